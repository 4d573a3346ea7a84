"""Measuring a policy: completions of held-out problems, graded, as one JSON and one table."""

from megatron_rft.evaluation.evaluate import EvalResult, evaluate
