"""Log-probs of given tokens and entropies from hidden states, without a [N, V] tensor: logits exist in blocks of
vocabulary columns, whose softmax statistics are merged (Milakov and Gimelshein 2018, arXiv:1805.02867, Algorithm 3).

    z_t = hidden_t W^T / temperature,   logprob_t = z_t[y_t] - log sum_j exp z_tj,   entropy_t = -sum_j p_tj log p_tj

Backward computes each block again. Blocks split the vocabulary and not the tokens, so that each row of the weight's
gradient is one matrix product over all tokens, which accumulates in fp32: an fp32 copy of the [V, H] gradient is not
needed. Matrix products run in the inputs' dtype, everything else in fp32.

With tensor parallelism each rank has V/tp rows of W, and all ranks pass the same `hidden` and `targets`. Forward makes
two collectives (one MAX, one SUM, of [N] numbers), backward none: the gradient of `hidden` is this rank's share, *not
yet summed over the group*. The caller sums it with a region before the call (`copy_to_tensor_model_parallel_region`, or
`gather_from_sequence_parallel_region` with tensor_parallel_output_grad).

With a `Support` the distributions are those of truncated sampling (top-k, top-p, min-p): logits outside of the set that
the engine kept are OUTSIDE, so that log-probs, entropies and divergences are over the set, normaliser and gradients
included. OUTSIDE is finite, since an infinity times a probability of 0 would be NaN.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rft.megatron.seams import named
from megatron_rft.records import Support

BLOCK_BYTES = 64 << 20  # of one fp32 block of logits
COLUMNS = 128  # a block's width is a multiple of this, and at least this
OUTSIDE = -1e30  # the logit of a token that truncated sampling left out


class Blocks:
    """Iterates over blocks of columns of [N, V/tp] logits."""

    def __init__(
        self,
        hidden: Tensor,  # [N, H]
        weight: Tensor,  # [V/tp, H] this rank's rows; rows from vocab_size on are padding and skipped
        targets: Tensor,  # [N] int64, ids of the whole vocabulary, all below vocab_size
        *,
        vocab_size: int,
        group: dist.ProcessGroup | None = None,  # tensor-parallel ranks
        temperature: float = 1.0,
        block_bytes: int = BLOCK_BYTES,
        support: Support | None = None,  # the tokens that truncated sampling kept, of all ranks' rows
        never: Sequence[int] = (),  # tokens that are never sampled, such as those of images
    ):
        assert temperature > 0, f"temperature {temperature}: a greedy distribution has no log-probabilities"
        self.group, first = group, dist.get_rank(group) * len(weight) if group is not None else 0
        self.hidden, self.weight = hidden.detach(), weight.detach()[: min(max(vocab_size - first, 0), len(weight))]
        self.targets, self.scale = targets - first, 1 / temperature
        self.dtype = torch.promote_types(hidden.dtype, torch.float32)
        fitting = block_bytes // (self.dtype.itemsize * max(len(hidden), 1))
        self.width = min(max(fitting // COLUMNS, 1) * COLUMNS, len(self.weight))
        self.truncated = support is not None
        self.never = [token - first for token in never]
        if support is not None:
            rows = torch.arange(len(hidden), device=hidden.device)
            self.row = rows.repeat_interleave(support.lens, output_size=len(support.ids))  # [K]
            self.column, self.cut = support.ids - first, (support.lens > 0).unsqueeze(1)  # [K], [N, 1]

    def __iter__(self):
        """Yield slices of the weight's rows, which are columns of the logits."""
        for start in range(0, len(self.weight), max(self.width, 1)):
            yield slice(start, min(start + self.width, len(self.weight)))

    @named(category="log-prob blocks")
    def logits(self, rows: slice) -> Tensor:
        """Return [N, columns] fp32 logits, which the caller may overwrite."""
        nothing = self.hidden.new_zeros(())
        product = torch.addmm(nothing, self.hidden, self.weight[rows].t(), beta=0, alpha=self.scale)
        logits = product.to(self.dtype)
        logits = self._without_never(logits, rows) if self.never else logits
        return self._truncate(logits, rows) if self.truncated else logits

    def logprobs(self, rows: slice, normalizer: Tensor) -> Tensor:
        """Return the same minus `normalizer` [N]."""
        return self.logits(rows).sub_(normalizer.unsqueeze(1))

    def probs_minus_target(self, normalizer: Tensor, rows: slice) -> Tensor:
        """Return [N, columns] p_j - 1[j = y], which is minus the gradient of a log-prob."""
        column, inside = self.target_columns(rows)
        return self.logprobs(rows, normalizer).exp_().scatter_add_(1, column, -inside)

    def _truncate(self, logits: Tensor, rows: slice) -> Tensor:
        """Set the logits outside of the support to OUTSIDE, in place."""
        width = logits.shape[1]
        inside = (self.column >= rows.start) & (self.column < rows.stop)
        place = self.row * width + (self.column - rows.start).clamp(0, width - 1)
        flat = logits.view(-1)
        kept = torch.where(inside, flat[place], OUTSIDE)
        logits.masked_fill_(self.cut, OUTSIDE)
        flat.scatter_reduce_(0, place, kept, "amax")  # entries of other blocks are OUTSIDE and change nothing
        return logits

    @property
    def rounds(self) -> bool:
        """Whether `logits` are rounded to the inputs' dtype before fp32."""
        return self.hidden.dtype != self.dtype

    def exact_logits(self, rows: slice) -> Tensor:
        """Return [N, columns] fp32 logits without that rounding, which the caller may overwrite."""
        columns = self.weight[rows].t()
        assert not self.truncated, "extrapolation belongs to offline training, which has no truncated sampling"
        if self.hidden.is_cuda:
            product = torch.mm(self.hidden, columns, out_dtype=self.dtype)
        else:
            product = torch.mm(self.hidden.to(self.dtype), columns.to(self.dtype))
        return self._without_never(product.mul_(self.scale), rows)

    def _without_never(self, logits: Tensor, rows: slice) -> Tensor:
        for token in self.never:
            if rows.start <= token < rows.stop:
                logits[:, token - rows.start] = OUTSIDE
        return logits

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

    @named(category="log-prob blocks")
    def add(self, logits: Tensor, targets: tuple[Tensor, Tensor], values: Tensor | None = None):
        """Add a block with its `target_columns`. Overwrites `logits` and `values`."""
        column, inside = targets
        self.target += (logits.gather(1, column) * inside).squeeze(1)
        self.rebase(torch.maximum(self.top, logits.amax(1)))
        logits.sub_(self.top.unsqueeze(1))
        exp = logits.exp_() if self.dot is None else logits.exp()
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


class Differentiable(torch.autograd.Function):
    """[N] values that were computed from `blocks`, as functions of hidden [N, H] and weight [V/tp, H].

    `logits_gradient` takes the gradients of the values (None: there is none) and returns a factor [N] per token and a
    function that returns [N, columns] of the logits' gradient for a block, without the factor, which is cheaper to
    apply to the [N, H] tensors of the products.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, blocks: Blocks, logits_gradient: Callable, *values: Tensor | None):
        ctx.save_for_backward(hidden, weight)
        ctx.blocks, ctx.logits_gradient = blocks, logits_gradient
        ctx.set_materialize_grads(False)
        return values

    @staticmethod
    def backward(ctx, *gradients):
        hidden, weight = ctx.saved_tensors
        factor, block_gradient = ctx.logits_gradient(*gradients)
        factor = factor.unsqueeze(1) * ctx.blocks.scale
        scaled = (hidden * factor).to(hidden.dtype)
        grad_hidden = torch.zeros_like(hidden, dtype=ctx.blocks.dtype) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for rows in ctx.blocks:
            block = block_gradient(rows).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden += block @ weight[rows]
            if grad_weight is not None:
                grad_weight[rows] = block.t() @ scaled
        if grad_hidden is not None:
            grad_hidden = grad_hidden.mul_(factor).to(hidden.dtype)
        return grad_hidden, grad_weight, None, None, *(None for _ in gradients)


def logprobs_and_entropy(
    hidden: Tensor,  # [N, H]
    weight: Tensor,  # [V/tp, H] this rank's rows
    targets: Tensor,  # [N]
    *,
    with_entropy: bool = True,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return ([N] log-probs, [N] entropies or None), fp32. `options`: those of `Blocks`.

    The backward pass of the entropy costs time only if a gradient reaches it: detach an entropy that is only logged.
    """
    blocks = Blocks(hidden, weight, targets, **options)
    sums = SoftmaxSums(blocks, dot=with_entropy)
    for rows in blocks:
        sums.add(blocks.logits(rows), blocks.target_columns(rows))
    if blocks.group is not None:
        reduce([sums], blocks.group)
    normalizer, entropy = sums.normalizer, sums.entropy if with_entropy else None

    def logits_gradient(grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor, Callable]:
        """d logprob / d z_j = 1[j = y] - p_j;   d entropy / d z_j = -p_j (log p_j + entropy)."""
        if grad_entropy is None:
            return -grad_logprobs, partial(blocks.probs_minus_target, normalizer)
        grads = torch.zeros_like(normalizer) if grad_logprobs is None else grad_logprobs
        return -torch.ones_like(normalizer), partial(_of_both, blocks, normalizer, entropy, grad_entropy, grads)

    return Differentiable.apply(hidden, weight, blocks, logits_gradient, sums.logprobs, entropy)


def _of_both(
    blocks: Blocks, normalizer: Tensor, entropy: Tensor, grad_entropy: Tensor, grad_logprobs: Tensor, rows: slice
) -> Tensor:
    """[N, columns] of the logits' gradient, times -1."""
    block = blocks.logprobs(rows, normalizer)
    column, inside = blocks.target_columns(rows)
    probs = block.exp()
    block.add_(entropy.unsqueeze(1)).mul_(grad_entropy.unsqueeze(1)).add_(grad_logprobs.unsqueeze(1))
    return block.mul_(probs).scatter_add_(1, column, -inside * grad_logprobs.unsqueeze(1))
