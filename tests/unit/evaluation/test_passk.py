import math
from itertools import combinations
from statistics import fmean

import pytest

from megatron_rft.evaluation.passk import (
    ks_up_to,
    majority,
    mean_majority,
    mean_pass_at_k,
    pass_at_1,
    pass_at_k,
)


def test_standard_error_over_completions():
    # a_1 = 1/2, a_2 = 1, a_3 = 0 over two problems: mean 1/2, std 1/2 (n-1), SE = 0.5 / sqrt(3)
    mean, error = pass_at_1([[1, 1, 0], [0, 1, 0]])
    assert mean == 0.5 and error == pytest.approx(0.5 / math.sqrt(3))


def test_one_completion_uses_the_binomial_error():
    assert pass_at_1([[1], [0], [0], [0]]) == (0.25, pytest.approx(math.sqrt(0.25 * 0.75 / 4)))


def test_failed_gradings_are_neither_right_nor_wrong():
    assert pass_at_1([[1, None], [0, 1]])[0] == fmean([0.5, 1.0])
    assert math.isnan(pass_at_1([[None]])[0])


@pytest.mark.parametrize(("samples", "right", "k"), [(5, 2, 1), (5, 2, 3), (5, 0, 2), (5, 5, 1), (4, 3, 2)])
def test_pass_at_k_counts_subsets(samples, right, k):
    draws = list(combinations([1] * right + [0] * (samples - right), k))
    assert pass_at_k(samples, right, k) == pytest.approx(fmean(any(draw) for draw in draws))


def test_pass_at_k_over_problems_and_the_ks_shown():
    assert mean_pass_at_k([[1, 0], [0, 0], [1, None]], 2) == 0.5  # the last problem has one graded completion
    assert ks_up_to(8) == [1, 2, 4, 8] and ks_up_to(6) == [1, 2, 4, 6] and ks_up_to(1) == [1]


def test_majority():
    assert majority(["a", "b", "b"], [1, 0, 0]) == 0
    assert majority(["a", "b"], [1, 0]) == 1  # a tie: the earlier
    assert majority([None, None, "b"], [0, 0, 1]) == 1 and majority([None], [0]) is None


def test_a_problem_that_nobody_could_grade_is_no_wrong_majority():
    answers = [["a", "b"], ["a", "a"], [None, None]]
    assert mean_majority(answers, [[1, 0], [None, None], [0, 0]]) == 0.5
    assert math.isnan(mean_majority(answers[:1], [[None, None]]))
