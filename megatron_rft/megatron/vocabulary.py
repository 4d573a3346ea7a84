"""Iterates over the logits of [N] tokens in blocks of vocabulary columns and merges softmax statistics.

logprobs.py and two_distributions.py use it. Blocks split the vocabulary and not the tokens, so that each row of the
weight's gradient is one matrix product over all tokens, which accumulates in fp32: an fp32 copy of the [V, H] gradient
is not needed. Matrix products run in the inputs' dtype, everything else in fp32.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

BLOCK_BYTES = 64 << 20  # of one fp32 block of logits
COLUMNS = 128  # a block's width is a multiple of this, and at least this


class Blocks:
    """Iterates over blocks of columns of [N, V/tp] logits, in memory that is allocated once."""

    def __init__(
        self,
        hidden: Tensor,  # [N, H]
        weight: Tensor,  # [V/tp, H] this rank's rows; rows from vocab_size on are padding and skipped
        targets: Tensor,  # [N] ids of the whole vocabulary
        *,
        vocab_size: int,
        group: dist.ProcessGroup | None,
        temperature: float,
        block_bytes: int,
    ):
        assert temperature > 0, f"temperature {temperature}: a greedy distribution has no log-probabilities"
        first = dist.get_rank(group) * len(weight) if group is not None else 0
        self.hidden, self.weight = hidden.detach(), weight.detach()[: min(max(vocab_size - first, 0), len(weight))]
        self.targets, self.scale = targets - first, 1 / temperature
        self.dtype = torch.promote_types(hidden.dtype, torch.float32)
        fitting = block_bytes // (self.dtype.itemsize * max(len(hidden), 1))
        self.width = min(max(fitting // COLUMNS, 1) * COLUMNS, len(self.weight))
        self.one = self.width == len(self.weight)
        self.buffers: dict[str, Tensor] = {}

    def __iter__(self):
        """Yield slices of the weight's rows, which are columns of the logits."""
        for start in range(0, len(self.weight), max(self.width, 1)):
            yield slice(start, min(start + self.width, len(self.weight)))

    def buffer(self, name: str, rows: slice, dtype: torch.dtype | None = None) -> Tensor:
        """Return [N, columns] scratch memory, the same for every block with that name."""
        if name not in self.buffers:
            self.buffers[name] = self.hidden.new_empty(len(self.hidden) * self.width, dtype=dtype or self.dtype)
        shape = len(self.hidden), rows.stop - rows.start
        return self.buffers[name][: shape[0] * shape[1]].view(shape)

    def release(self):
        self.buffers.clear()

    def logits(self, rows: slice) -> Tensor:
        """Return [N, columns] fp32 logits, which the caller may overwrite."""
        product = self.buffer("product", rows, self.hidden.dtype)
        torch.addmm(product, self.hidden, self.weight[rows].t(), beta=0, alpha=self.scale, out=product)
        return self.cast(product, "logits", rows, self.dtype)

    @property
    def rounds(self) -> bool:
        """Whether `logits` are rounded to the inputs' dtype before fp32."""
        return self.hidden.dtype != self.dtype

    def exact_logits(self, rows: slice) -> Tensor:
        """Return [N, columns] fp32 logits without that rounding, which the caller may overwrite."""
        columns = self.weight[rows].t()
        if self.hidden.is_cuda:
            return torch.mm(self.hidden, columns, out_dtype=self.dtype).mul_(self.scale)
        out = self.buffer("exact", rows)
        return torch.mm(self.hidden.to(self.dtype), columns.to(self.dtype), out=out).mul_(self.scale)

    def cast(self, values: Tensor, name: str, rows: slice, dtype: torch.dtype) -> Tensor:
        return values if values.dtype == dtype else self.buffer(name, rows, dtype).copy_(values)

    def target_columns(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Return [N, 1] the target's column in this block (arbitrary if it is in another), and [N, 1] 1 if it is in
        this block, else 0."""
        column = (self.targets - rows.start).unsqueeze(1)
        last = rows.stop - rows.start - 1
        return column.clamp(0, last), ((column >= 0) & (column <= last)).to(self.dtype)


class SoftmaxSums:
    """Running statistics of [N] rows of logits z: top = max z, total = sum e^(z - top), target = z_y; optionally
    dot = sum e^(z - top) (z - top), and moment = sum e^(z - top) v for values v of the caller."""

    def __init__(self, blocks: Blocks, dot: bool = False, moment: bool = False):
        like = blocks.hidden.new_zeros(len(blocks.hidden), dtype=blocks.dtype)
        self.top = torch.full_like(like, torch.finfo(like.dtype).min)  # finite, because a rank may have only padding
        self.total, self.target = like, like.clone()
        self.dot = like.clone() if dot else None
        self.moment = like.clone() if moment else None

    def rebase(self, top: Tensor):
        """Express the sums relative to another maximum, which is at least the current one."""
        shift = self.top - top
        if self.dot is not None:
            self.dot = (self.dot + shift * self.total) * shift.exp()
        if self.moment is not None:
            self.moment = self.moment * shift.exp()
        self.total, self.top = self.total * shift.exp(), top

    def add(self, logits: Tensor, targets: tuple[Tensor, Tensor], scratch: Tensor, values: Tensor | None = None):
        """Add a block with its `target_columns`. Leaves logits - top in `logits`, unless that is also `scratch`;
        overwrites `values`."""
        column, inside = targets
        self.target += (logits.gather(1, column) * inside).squeeze(1)
        self.rebase(torch.maximum(self.top, logits.amax(1)))
        logits.sub_(self.top.unsqueeze(1))
        exp = torch.exp(logits, out=scratch)
        self.total += exp.sum(1)
        if self.moment is not None:
            self.moment += values.mul_(exp).sum(1)
        if self.dot is not None:
            self.dot += exp.mul_(logits).sum(1)

    @property
    def log_total(self) -> Tensor:
        return self.total.log()

    @property
    def normalizer(self) -> Tensor:
        """[N] log sum_j e^z_j"""
        return self.top + self.log_total

    @property
    def logprobs(self) -> Tensor:
        """[N] log-probs of the targets"""
        return self.target - self.top - self.log_total

    @property
    def entropy(self) -> Tensor:
        return self.log_total - self.dot / self.total


def reduce(many: list[SoftmaxSums], group: dist.ProcessGroup) -> None:
    """Reduce statistics over the group's vocabulary shards, with one MAX and one SUM for all of them."""
    tops = torch.stack([sums.top for sums in many])
    dist.all_reduce(tops, dist.ReduceOp.MAX, group=group)
    for sums, top in zip(many, tops, strict=True):
        sums.rebase(top)
    names = [(s, name) for s in many for name in ("target", "total", "dot", "moment") if getattr(s, name) is not None]
    stacked = torch.stack([getattr(sums, name) for sums, name in names])
    dist.all_reduce(stacked, group=group)
    for (sums, name), value in zip(names, stacked, strict=True):
        setattr(sums, name, value)


def input_gradients(
    blocks: Blocks,
    hidden: Tensor,  # [N, H]
    weight: Tensor,  # [V/tp, H]
    needed: tuple[bool, bool],
    factor: Tensor,  # [N]
    logit_gradient: Callable[[slice], Tensor],
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of hidden and weight. `logit_gradient` returns [N, columns] of the logits' gradient for a
    block, without `factor`, one per token, which is cheaper to apply to the [N, H] tensors of the products.
    """
    factor = factor.unsqueeze(1) * blocks.scale
    scaled = (hidden * factor).to(hidden.dtype)
    grad_hidden = torch.zeros_like(hidden, dtype=blocks.dtype) if needed[0] else None
    grad_weight = torch.zeros_like(weight) if needed[1] else None
    for rows in blocks:
        block = blocks.cast(logit_gradient(rows), "product", rows, hidden.dtype)
        if grad_hidden is not None:
            grad_hidden += block @ weight[rows]
        if grad_weight is not None:
            torch.mm(block.t(), scaled, out=grad_weight[rows])
    blocks.release()
    if grad_hidden is not None:
        grad_hidden = grad_hidden.mul_(factor).to(hidden.dtype)
    return grad_hidden, grad_weight
