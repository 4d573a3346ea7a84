"""A second distribution (a reference, a teacher) over the same response tokens, for losses that compare two."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rft.records import Batch


@dataclass(frozen=True)
class Second:
    """A second distribution without a gradient: that of `weights` (a snapshot; None: the current ones) on `batch`,
    which has the same responses, possibly with other prompts."""

    batch: Batch
    weights: list[Tensor] | None = None
    extrapolation: float = 0.0


@dataclass(frozen=True)
class Recorded:
    """The same from stored hidden states, without a forward pass."""

    batch: Batch
    rows: Callable[[Tensor], Tensor]  # numbers of response tokens of `batch` -> their [n, H]
    weight: Tensor  # [padded V / tp, H] this rank's rows of the output matrix
    extrapolation: float = 0.0


@dataclass(frozen=True)
class HiddenStates:
    """Of the response tokens in this rank's share, on its last pipeline stage; elsewhere there are none."""

    rows: Tensor  # [tokens of the share + 1, H] on the host; the last row is zero, for a filler's tokens
    place: Tensor  # [R] the row of each response token of the global batch, -1 where another rank has it
    weight: Tensor  # [padded V / tp, H] the output matrix that belongs to them
    extrapolation: float

    @classmethod
    def of(
        cls, batch: Batch, numbers: Tensor, rows: Tensor, weight: Tensor, extrapolation: float = 0.0
    ) -> "HiddenStates":
        """`rows` [n, H] are those of the response tokens `numbers` of the batch."""
        place = torch.full((len(batch.response_ids),), -1)
        place[numbers] = torch.arange(len(numbers))
        return cls(torch.cat([rows, rows.new_zeros(1, weight.shape[1])]), place, weight, extrapolation)
