"""Evaluation: graded completions of held-out problems, with results as JSON and as a table."""
