"""The pairs that are made, and refusals."""

import pytest
import torch

from megatron_rft.objectives.offline.pairs import pair_up, split_pairs
from megatron_rft.records import Batch
from megatron_rft.utils.errors import DataError
from tests.made import made


def data(rewards, groups):
    sequences = {"rewards": torch.tensor(rewards), "group": torch.tensor(groups)}
    return Batch.of([[1]] * len(rewards), [[2]] * len(rewards), sequences=sequences)


def test_pairings_by_hand():
    rewards, groups = [1, -1, 1, 1, -1, -1], [4, 4, 4, 2, 2, 9]
    assert pair_up(rewards, groups, "cover") == [(0, 1), (2, 1), (3, 4)]
    assert pair_up(rewards, groups, "one") == [(0, 1), (3, 4)]
    assert pair_up(rewards, groups, "all") == [(0, 1), (2, 1), (3, 4)]
    assert pair_up([1, 1, -1, -1], [0] * 4, "all") == [(0, 2), (0, 3), (1, 2), (1, 3)]


def test_problems_without_both_sides_have_no_pair():
    assert pair_up([1, 1, -1], [0, 0, 1]) == []
    with pytest.raises(DataError, match="no problem has a right and a wrong answer"):
        made("dpo").examples(data([1.0, 1.0, -1.0], [0, 0, 1]))


def test_rft_draws_the_right_ones():
    assert made("rft").examples(data([1.0, -1.0, 1.0], [0, 0, 1])) == [(0,), (2,)]


def test_sides_are_found_in_any_order():
    batch = data([-1.0, 1.0, 1.0, -1.0], [0, 0, 0, 0]).with_sequences(unit=torch.tensor([5, 2, 5, 2]))
    right, wrong = split_pairs(torch.tensor([10.0, 11.0, 12.0, 13.0]), batch)
    assert right.tolist() == [11.0, 12.0] and wrong.tolist() == [13.0, 10.0]


def test_a_torn_pair_fails_an_assertion():
    batch = data([1.0, -1.0], [0, 0]).with_sequences(unit=torch.tensor([0, 1]))
    with pytest.raises(AssertionError):
        split_pairs(torch.zeros(2), batch)
