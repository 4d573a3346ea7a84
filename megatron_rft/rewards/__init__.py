"""Verifiers: from a problem and a response to a reward. Imports nothing, since grading processes must load no torch."""
