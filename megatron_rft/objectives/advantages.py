"""Credit assignment from rewards. Pure functions on [B] rewards and [B] group numbers."""

import torch
from torch import Tensor

from megatron_rft.records import Batch


def _group_sums(values: Tensor, groups: Tensor, size: int) -> Tensor:
    return values.new_zeros(size).index_add_(0, groups, values)


def group_relative(rewards: Tensor, group: Tensor) -> Tensor:
    """A_i = (R_i - mean) / std within each group, with the population std (pipo.txt Eq. 3).

    A group whose rewards are all equal gets zeros exactly. Computed in float64.

    Args:
        rewards: [B] verifier rewards.
        group: [B] any numbers; equal ones belong together.

    Returns:
        [B] float32.
    """
    _, groups = group.unique(return_inverse=True)
    size = int(groups.max()) + 1 if len(groups) else 0
    rewards = rewards.double()
    number = _group_sums(torch.ones_like(rewards), groups, size)
    centred = rewards - (_group_sums(rewards, groups, size) / number)[groups]
    std = (_group_sums(centred**2, groups, size) / number).sqrt()[groups]
    highest, lowest = (
        rewards.new_zeros(size).scatter_reduce_(0, groups, rewards, how, include_self=False) for how in ("amax", "amin")
    )
    equal = (highest == lowest)[groups]
    return torch.where(equal, 0.0, centred / torch.where(equal, 1.0, std)).float()


def group_normalised(advantages: Tensor, group: Tensor) -> Tensor:
    """a_i = G A_i / sum_j |A_j| within each group (pipo.txt 4.1); a group of zeros stays zero. [B] -> [B]"""
    _, groups = group.unique(return_inverse=True)
    size = int(groups.max()) + 1 if len(groups) else 0
    number = _group_sums(torch.ones_like(advantages), groups, size)
    total = _group_sums(advantages.abs(), groups, size)
    scale = torch.where(total > 0, number / torch.where(total > 0, total, 1.0), 0.0)
    return advantages * scale[groups]


def to_tokens(values: Tensor, batch: Batch) -> Tensor:
    """[B] one value per sequence -> [R] the same for each of its response tokens."""
    return values[batch.sequence_ids]
