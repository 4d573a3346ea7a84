"""Computes log-probabilities of given tokens and the entropy of their distributions from hidden states.

    z_t = hidden_t W^T / temperature,   logprob_t = z_t[y_t] - log sum_j exp z_tj,   entropy_t = -sum_j p_tj log p_tj

The output matrix is part of the function, so a [N, V] tensor never exists: the function iterates over blocks of
vocabulary columns and merges softmax statistics online (Milakov and Gimelshein 2018, arXiv:1805.02867, Algorithm 3).
Backward computes each block again; if there is only one block, it is kept.

With tensor parallelism each rank has V/tp rows of W, and all ranks pass the same `hidden` and `targets`. Forward makes
two collectives (one MAX, one SUM, of [N] numbers), backward none: the gradient of `hidden` is this rank's share, *not
yet summed over the group*. The caller sums it with a region before the call (`copy_to_tensor_model_parallel_region`, or
`gather_from_sequence_parallel_region` with tensor_parallel_output_grad).
"""

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rft.megatron.vocabulary import BLOCK_BYTES, Blocks, SoftmaxSums, input_gradients, reduce


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
    """Return ([N] log-probs, [N] entropies or None), fp32. Rows of `weight` from `vocab_size` on are ignored padding.

    The backward pass of the entropy costs time only if a gradient reaches it: detach an entropy that is only logged.
    """
    shape = {"vocab_size": vocab_size, "group": group, "temperature": temperature, "block_bytes": block_bytes}
    return _LogProbs.apply(hidden, weight, Blocks(hidden, weight, targets, **shape), group, with_entropy)


def block_of_logprobs(blocks: Blocks, rows: slice, normalizer: Tensor, kept: tuple[Tensor, Tensor] | None) -> Tensor:
    """Return [N, columns] log-probs of a block in scratch memory, from its `kept` (logits - top, top) unless None."""
    if kept is None:
        return blocks.logits(rows).sub_(normalizer.unsqueeze(1))
    shifted, top = kept
    return torch.add(shifted, (top - normalizer).unsqueeze(1), out=blocks.buffer("logits", rows))


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, blocks: Blocks, group, with_entropy: bool):
        sums, kept = SoftmaxSums(blocks, dot=with_entropy), None
        for rows in blocks:
            logits = blocks.logits(rows)
            apart = with_entropy or blocks.one
            sums.add(logits, blocks.target_columns(rows), blocks.buffer("scratch", rows) if apart else logits)
            kept = (logits, sums.top) if blocks.one else None
        blocks.release()
        if group is not None:
            reduce([sums], group)
        entropy = sums.entropy if with_entropy else None
        ctx.save_for_backward(hidden, weight, sums.normalizer, entropy)
        ctx.blocks, ctx.kept = blocks, kept
        ctx.set_materialize_grads(False)
        return sums.logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        """d logprob / d z_j = 1[j = y] - p_j;   d entropy / d z_j = -p_j (log p_j + entropy).

        Without an entropy gradient the block is p - onehot, and -grad_logprob is a factor per token.
        """
        hidden, weight, normalizer, entropy = ctx.saved_tensors
        blocks = ctx.blocks
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(normalizer)

        def of_logprobs(rows: slice) -> Tensor:
            column, inside = blocks.target_columns(rows)
            return block_of_logprobs(blocks, rows, normalizer, ctx.kept).exp_().scatter_add_(1, column, -inside)

        def of_both(rows: slice) -> Tensor:
            block = block_of_logprobs(blocks, rows, normalizer, ctx.kept)
            column, inside = blocks.target_columns(rows)
            probs = torch.exp(block, out=blocks.buffer("scratch", rows))
            block.add_(entropy.unsqueeze(1)).mul_(grad_entropy.unsqueeze(1)).add_(grad_logprobs.unsqueeze(1))
            return block.mul_(probs).scatter_add_(1, column, -inside * grad_logprobs.unsqueeze(1))

        plain = grad_entropy is None
        factor = -grad_logprobs if plain else -torch.ones_like(normalizer)
        needed = ctx.needs_input_grad[:2]
        found = input_gradients(blocks, hidden, weight, needed, factor, of_logprobs if plain else of_both)
        return *found, None, None, None
