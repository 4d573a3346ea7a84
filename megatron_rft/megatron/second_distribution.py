"""Describes a second distribution (a reference, a teacher) over the same response tokens, for losses that compare
two."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rft.records import Batch


@dataclass(frozen=True)
class Second:
    """A second distribution without a gradient, computed with `weights` (a snapshot; None: the current ones) on
    `batch`, which has the same responses, possibly after other prompts."""

    batch: Batch
    weights: list[Tensor] | None = None
    extrapolation: float = 0.0


@dataclass(frozen=True)
class Recorded:
    """A second distribution from stored hidden states, without a forward pass."""

    batch: Batch
    rows: Callable[[Tensor], Tensor]  # indices of response tokens of `batch` -> their hidden states [n, H]
    weight: Tensor  # [padded V / tp, H] this rank's rows of the output matrix
    extrapolation: float = 0.0


@dataclass(frozen=True)
class HiddenStates:
    """The hidden states of the response tokens in this rank's share; only ranks on the last pipeline stage have
    them."""

    rows: Tensor  # [tokens of the share + 1, H] on the host; the last row is zero, for a filler's tokens
    row_of_token: Tensor  # [R] the row of each response token of the global batch; -1 if another rank has it
    weight: Tensor  # [padded V / tp, H] the output matrix of the distribution
    extrapolation: float

    @classmethod
    def of(
        cls, batch: Batch, numbers: Tensor, rows: Tensor, weight: Tensor, extrapolation: float = 0.0
    ) -> "HiddenStates":
        """Create the states from `rows` [n, H] of the response tokens `numbers` of the batch."""
        row_of_token = torch.full((len(batch.response_ids),), -1)
        row_of_token[numbers] = torch.arange(len(numbers))
        return cls(torch.cat([rows, rows.new_zeros(1, weight.shape[1])]), row_of_token, weight, extrapolation)
