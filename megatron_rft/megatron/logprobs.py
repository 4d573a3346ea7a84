"""Log-probabilities of given tokens and the entropy of their distributions, straight from hidden states.

    z_t = hidden_t W^T / temperature,   logprob_t = z_t[y_t] - log sum_j exp z_tj,   entropy_t = -sum_j p_tj log p_tj

The output matrix is part of the function, so a [N, V] tensor never exists: the vocabulary is walked in blocks of
columns, softmax statistics are merged online (Milakov and Gimelshein 2018, arXiv:1805.02867, Algorithm 3), and backward
computes each block again, unless one block is all there is: that one is kept. Blocks cut the vocabulary and not the
tokens, because then every row of the weight's gradient comes out of one matrix product over all tokens, accumulated in
fp32 inside it: no fp32 copy of a [V, H] gradient is needed. Matrix products run in the inputs' dtype, everything else
in fp32.

Under tensor parallelism each rank holds V/tp rows of W and every rank calls with the same `hidden` and `targets`.
A call makes two collectives in forward (one MAX, one SUM, of [N] numbers), and none in backward: the gradient of
`hidden` is this rank's share, *not yet summed over the group*. The caller's region ahead of the call does the sum
(`copy_to_tensor_model_parallel_region`, or `gather_from_sequence_parallel_region` with tensor_parallel_output_grad).
"""

import torch
import torch.distributed as dist
from torch import Tensor

BLOCK_BYTES = 64 << 20  # of one fp32 block of logits
COLUMNS = 128  # a block's width is a multiple of this, and at least this


def logprobs_and_entropy(
    hidden: Tensor,  # [N, H]
    weight: Tensor,  # [V/tp, H] this rank's rows
    targets: Tensor,  # [N] int64, ids of the whole vocabulary, all below vocab_size
    *,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
    with_entropy: bool = True,
    block_bytes: int = BLOCK_BYTES,
) -> tuple[Tensor, Tensor | None]:
    """([N] log-probs, [N] entropies or None), fp32. Rows of `weight` from `vocab_size` on are padding and do not exist.

    Entropy's share of backward is paid only when a gradient reaches it: detach it when it is only logged.
    """
    assert temperature > 0, f"temperature {temperature}: a greedy distribution has no log-probabilities"
    first = dist.get_rank(group) * len(weight) if group is not None else 0
    size = min(max(vocab_size - first, 0), len(weight))
    blocks = _Blocks(hidden, weight[:size], targets - first, 1 / temperature, block_bytes)
    return _LogProbs.apply(hidden, weight, blocks, group, with_entropy)


class _Blocks:
    """A walk over [N, V/tp] logits, a block of columns at a time, in memory that is allocated once."""

    def __init__(self, hidden: Tensor, weight: Tensor, targets: Tensor, scale: float, block_bytes: int):
        self.hidden, self.weight, self.targets, self.scale = hidden.detach(), weight.detach(), targets, scale
        self.dtype = torch.promote_types(hidden.dtype, torch.float32)
        fitting = block_bytes // (self.dtype.itemsize * max(len(hidden), 1))
        self.width = min(max(fitting // COLUMNS, 1) * COLUMNS, len(weight))
        self.one = self.width == len(weight)
        self.buffers: dict[str, Tensor] = {}

    def __iter__(self):
        """Slices of the weight's rows, which are columns of the logits."""
        for start in range(0, len(self.weight), max(self.width, 1)):
            yield slice(start, min(start + self.width, len(self.weight)))

    def buffer(self, name: str, rows: slice, dtype: torch.dtype) -> Tensor:
        """[N, columns] scratch memory: the same for every block of that name."""
        if name not in self.buffers:
            self.buffers[name] = self.hidden.new_empty(len(self.hidden) * self.width, dtype=dtype)
        shape = len(self.hidden), rows.stop - rows.start
        return self.buffers[name][: shape[0] * shape[1]].view(shape)

    def release(self):
        self.buffers.clear()

    def logits(self, rows: slice) -> Tensor:
        """[N, columns] fp32, for the caller to overwrite."""
        product = self.buffer("product", rows, self.hidden.dtype)
        torch.addmm(product, self.hidden, self.weight[rows].t(), beta=0, alpha=self.scale, out=product)
        return self.cast(product, "logits", rows, self.dtype)

    def cast(self, values: Tensor, name: str, rows: slice, dtype: torch.dtype) -> Tensor:
        return values if values.dtype == dtype else self.buffer(name, rows, dtype).copy_(values)

    def places(self, rows: slice) -> tuple[Tensor, Tensor]:
        """[N, 1] the target's column in this block (any, where it is in another), and 1 where it is here, else 0."""
        column = (self.targets - rows.start).unsqueeze(1)
        last = rows.stop - rows.start - 1
        return column.clamp(0, last), ((column >= 0) & (column <= last)).to(self.dtype)


class _SoftmaxSums:
    """Running statistics of [N] rows: top = max z, total = sum e^(z - top), dot = sum e^(z - top) (z - top)."""

    def __init__(self, blocks: _Blocks, with_entropy: bool):
        like = blocks.hidden.new_zeros(len(blocks.hidden), dtype=blocks.dtype)
        self.top = torch.full_like(like, torch.finfo(like.dtype).min)  # finite: a rank may hold nothing but padding
        self.total, self.target = like, like.clone()
        self.dot = like.clone() if with_entropy else None

    def rebase(self, top: Tensor):
        """Express the sums relative to another maximum, at least the present one."""
        shift = self.top - top
        if self.dot is not None:
            self.dot = (self.dot + shift * self.total) * shift.exp()
        self.total, self.top = self.total * shift.exp(), top

    def add(self, logits: Tensor, column: Tensor, here: Tensor, scratch: Tensor):
        """Take in a block. Leaves logits - top in `logits`, unless that is `scratch` too."""
        self.target += (logits.gather(1, column) * here).squeeze(1)
        self.rebase(torch.maximum(self.top, logits.amax(1)))
        logits.sub_(self.top.unsqueeze(1))
        exp = torch.exp(logits, out=scratch)
        self.total += exp.sum(1)
        if self.dot is not None:
            self.dot += exp.mul_(logits).sum(1)

    def reduce(self, group: dist.ProcessGroup):
        """Sums over the whole vocabulary, on every rank of the group."""
        top = self.top.clone()
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        self.rebase(top)
        sums = torch.stack([self.target, self.total] + ([] if self.dot is None else [self.dot]))
        dist.all_reduce(sums, group=group)
        self.target, self.total, *dot = sums
        self.dot = dot[0] if dot else None


def _logprobs(blocks: _Blocks, rows: slice, normalizer: Tensor, kept: tuple[Tensor, Tensor] | None) -> Tensor:
    """[N, columns] log-probs of a block in scratch memory, from its `kept` (logits - top, top) if there is that."""
    if kept is None:
        return blocks.logits(rows).sub_(normalizer.unsqueeze(1))
    shifted, top = kept
    return torch.add(shifted, (top - normalizer).unsqueeze(1), out=blocks.buffer("logits", rows, blocks.dtype))


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, blocks: _Blocks, group, with_entropy: bool):
        sums, kept = _SoftmaxSums(blocks, with_entropy), None
        for rows in blocks:
            logits = blocks.logits(rows)
            apart = with_entropy or blocks.one
            scratch = blocks.buffer("scratch", rows, blocks.dtype) if apart else logits
            sums.add(logits, *blocks.places(rows), scratch)
            kept = (logits, sums.top) if blocks.one else None
        blocks.release()
        if group is not None:
            sums.reduce(group)
        log_total = sums.total.log()
        entropy = log_total - sums.dot / sums.total if with_entropy else None
        ctx.save_for_backward(hidden, weight, sums.top + log_total, entropy)
        ctx.blocks, ctx.kept = blocks, kept
        ctx.set_materialize_grads(False)
        return sums.target - sums.top - log_total, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        """d logprob / d z_j = 1[j = y] - p_j;   d entropy / d z_j = -p_j (log p_j + entropy).

        Both have a factor per token that need not touch the [N, V] block: without an entropy gradient the block holds
        p - onehot, and the factor -grad_logprob is applied to [N, H] tensors on either side of the products.
        """
        hidden, weight, normalizer, entropy = ctx.saved_tensors
        blocks = ctx.blocks
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(normalizer)
        factor = (-grad_logprobs if grad_entropy is None else -torch.ones_like(normalizer)).unsqueeze(1) * blocks.scale
        scaled = (hidden * factor).to(hidden.dtype)
        grad_hidden = torch.zeros_like(hidden, dtype=blocks.dtype) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for rows in blocks:
            block = _logprobs(blocks, rows, normalizer, ctx.kept)
            column, here = blocks.places(rows)
            if grad_entropy is None:
                block.exp_().scatter_add_(1, column, -here)
            else:
                probs = torch.exp(block, out=blocks.buffer("scratch", rows, blocks.dtype))
                block.add_(entropy.unsqueeze(1)).mul_(grad_entropy.unsqueeze(1)).add_(grad_logprobs.unsqueeze(1))
                block.mul_(probs).scatter_add_(1, column, -here * grad_logprobs.unsqueeze(1))
            block = blocks.cast(block, "product", rows, hidden.dtype)
            if grad_hidden is not None:
                grad_hidden += block @ weight[rows]
            if grad_weight is not None:
                torch.mm(block.t(), scaled, out=grad_weight[rows])
        blocks.release()
        if grad_hidden is not None:
            grad_hidden = grad_hidden.mul_(factor).to(hidden.dtype)
        return grad_hidden, grad_weight, None, None, None
