"""pass@1 with its standard error, pass@k and majority votes, from a table of graded completions. Plain Python.

`correct[i][j]` is the reward (1 or 0) of completion j of problem i; None where the grader failed, which is neither.
"""

import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean, stdev

Correct = Sequence[Sequence[float | None]]


def pass_at_1(correct: Correct) -> tuple[float, float]:
    """The mean over j of a_j, the accuracy of completion j over problems, and its standard error.

    n completions (fpa.txt B.3): SE = std(a_1..a_n) / sqrt(n), std with n-1: the spread of sampling, on these problems.
    n = 1 has no such spread; then SE = sqrt(p (1-p) / N), the binomial one over the N problems, which also holds the
    choice of problems and so is larger.
    """
    completions = [[value for value in column if value is not None] for column in zip(*correct, strict=True)]
    accuracies = [fmean(column) for column in completions if column]
    if not accuracies:
        return math.nan, math.nan
    mean = fmean(accuracies)
    if len(accuracies) == 1:
        graded = max(len(column) for column in completions)
        return mean, math.sqrt(max(mean * (1 - mean), 0.0) / graded)
    return mean, stdev(accuracies) / math.sqrt(len(accuracies))


def pass_at_k(samples: int, right: int, k: int) -> float:
    """The chance that k of the n completions, drawn without replacement, hold a right one (arXiv:2107.03374, Eq. 1):
    1 - C(n-c, k) / C(n, k)."""
    assert 1 <= k <= samples, f"pass@{k} of {samples} samples"
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def mean_pass_at_k(correct: Correct, k: int) -> float:
    """pass@k over the problems with at least k graded completions."""
    graded = [[value for value in row if value is not None] for row in correct]
    values = [pass_at_k(len(row), sum(value > 0.5 for value in row), k) for row in graded if len(row) >= k]
    return fmean(values) if values else math.nan


def majority(answers: Sequence[str | None], correct: Sequence[float | None]) -> float | None:
    """The reward of the most frequent answer (the earliest of equals). None where no completion gives an answer."""
    votes = [(answer, value) for answer, value in zip(answers, correct, strict=True) if answer and value is not None]
    if not votes:
        return None
    winner, _ = Counter(answer for answer, _ in votes).most_common(1)[0]
    return next(value for answer, value in votes if answer == winner)


def mean_majority(answers: Sequence[Sequence[str | None]], correct: Correct) -> float:
    """The share of problems whose most frequent answer is right, of those with a graded completion."""
    graded = [each for each in zip(answers, correct, strict=True) if any(value is not None for value in each[1])]
    return fmean(majority(*each) or 0.0 for each in graded) if graded else math.nan


def ks_up_to(samples: int) -> list[int]:
    """The k that a table shows: 1, 2, 4 ... and n itself."""
    powers = [2**i for i in range(samples.bit_length()) if 2**i <= samples]
    return powers if powers[-1] == samples else [*powers, samples]


def with_error(mean: float, standard_error: float, digits: int = 3) -> str:
    """0.412 ± 0.009"""
    return f"{mean:.{digits}f} ± {standard_error:.{digits}f}"
