"""Compares a trained distribution pi with a frozen one q, from their hidden states and output matrices.

With logits z of pi and u of q at the same positions (both divided by the temperature), and y_t the given token:

    logprobs               log pi(y_t)                                              gradient
    entropy                -sum_j pi_j log pi_j                                     gradient
    reverse_kl             KL(pi || q) = sum_j pi_j (z_j - u_j) - log Z_pi + log Z_q    gradient
    forward_kl             KL(q || pi) = sum_j q_j (u_j - z_j) - log Z_q + log Z_pi     gradient
    other_logprobs         log q(y_t)
    extrapolated_logprobs  log softmax((1 + lambda) z - lambda u)[y_t]              (fpa.txt Eq. 4)

All are exact over the whole vocabulary and computed in one pass over blocks of its columns: statistics are merged
online, and a [N, V] tensor never exists. Only the requested outputs are computed. q never has a gradient; backward
recomputes q's logits only if a KL has a gradient. Conventions (padding rows, tensor parallelism with two collectives in
forward and none in backward, the gradient of `hidden` not yet summed) are those of logprobs.py.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rft.megatron.logprobs import block_of_logprobs
from megatron_rft.megatron.vocabulary import BLOCK_BYTES, Blocks, SoftmaxSums, input_gradients, reduce

WITH_GRADIENT = frozenset({"logprobs", "entropy", "reverse_kl", "forward_kl"})
NAMES = WITH_GRADIENT | {"other_logprobs", "extrapolated_logprobs"}


def compare(
    hidden: Tensor,  # [N, H] of pi
    weight: Tensor,  # [V/tp, H] this rank's rows
    other_hidden: Tensor,  # [N, H'] of q
    other_weight: Tensor,  # [V/tp, H'] the same rows of the vocabulary
    targets: Tensor,  # [N] int64, all below vocab_size
    *,
    names: frozenset[str],
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
    extrapolation: float = 0.0,
    block_bytes: int = BLOCK_BYTES,
) -> dict[str, Tensor]:
    """Return [N] fp32 for each name of `names`. Rows of the weights from `vocab_size` on are ignored padding."""
    assert names <= NAMES, f"unknown: {sorted(names - NAMES)}"
    assert len(weight) == len(other_weight) and len(hidden) == len(other_hidden) and extrapolation >= 0
    shape = {"vocab_size": vocab_size, "group": group, "temperature": temperature, "block_bytes": block_bytes}
    own, other = Blocks(hidden, weight, targets, **shape), Blocks(other_hidden, other_weight, targets, **shape)
    order = sorted(names)
    return dict(zip(order, _Compare.apply(hidden, weight, own, other, group, order, extrapolation), strict=True))


class _Walk(NamedTuple):
    """Statistics of pi, q and the extrapolation, and (logits - top, top) of pi and q if there is only one block."""

    own: SoftmaxSums
    other: SoftmaxSums | None
    extrapolated: SoftmaxSums | None
    kept: tuple[Tensor, Tensor] | None
    other_kept: tuple[Tensor, Tensor] | None


def _walk(own: Blocks, other: Blocks, group, names: set[str], extrapolation: float) -> _Walk:
    reverse, forward = "reverse_kl" in names, "forward_kl" in names
    of_own = SoftmaxSums(own, dot="entropy" in names, moment=reverse)
    of_other = SoftmaxSums(other, moment=forward) if reverse or forward or "other_logprobs" in names else None
    extrapolated = SoftmaxSums(own) if "extrapolated_logprobs" in names else None
    kept = other_kept = None
    for rows in own:
        columns, gap, other_gap = own.target_columns(rows), None, None
        logits = own.logits(rows)
        if of_other or (extrapolated and not other.rounds):
            other_logits = other.logits(rows)
        if extrapolated:
            # The extrapolation amplifies bf16's rounding errors, which always lowers the weights: by 6 % at lambda 20.
            exact, other_exact = (
                (own.exact_logits(rows), other.exact_logits(rows)) if own.rounds else (logits, other_logits)
            )
            ahead = torch.mul(other_exact, -extrapolation, out=own.buffer("scratch", rows))
            extrapolated.add(ahead.add_(exact, alpha=1 + extrapolation), columns, ahead)
        if reverse:
            gap = torch.sub(logits, other_logits, out=own.buffer("gap", rows))
        if forward:
            other_gap = torch.sub(other_logits, logits, out=other.buffer("gap", rows))
        of_own.add(logits, columns, own.buffer("scratch", rows), gap)
        if of_other:
            of_other.add(other_logits, columns, own.buffer("scratch", rows), other_gap)
        if own.one:
            kept = (logits, of_own.top)
            other_kept = (other_logits, of_other.top) if reverse or forward else None
    own.release(), other.release()
    if group is not None:
        reduce([sums for sums in (of_own, of_other, extrapolated) if sums is not None], group)
    return _Walk(of_own, of_other, extrapolated, kept, other_kept)


def _difference(own: SoftmaxSums, other: SoftmaxSums) -> Tensor:
    """Return [N] log Z_own - log Z_other, in an order that avoids cancellation if they are close."""
    return (own.top - other.top) + (own.log_total - other.log_total)


class _Compare(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, own: Blocks, other: Blocks, group, names: list[str], extrapolation: float):
        found = _walk(own, other, group, set(names), extrapolation)
        formulas = {
            "logprobs": lambda: found.own.logprobs,
            "entropy": lambda: found.own.entropy,
            "other_logprobs": lambda: found.other.logprobs,
            "extrapolated_logprobs": lambda: found.extrapolated.logprobs,
            "reverse_kl": lambda: found.own.moment / found.own.total - _difference(found.own, found.other),
            "forward_kl": lambda: found.other.moment / found.other.total - _difference(found.other, found.own),
        }
        values = {name: formulas[name]() for name in names}
        other_normalizer = found.other.normalizer if found.other else None
        saved = (found.own.normalizer, other_normalizer, values.get("entropy"), values.get("reverse_kl"))
        ctx.save_for_backward(hidden, weight, *saved)
        ctx.own, ctx.other, ctx.names, ctx.kept, ctx.other_kept = own, other, names, found.kept, found.other_kept
        ctx.mark_non_differentiable(*(values[name] for name in names if name not in WITH_GRADIENT))
        ctx.set_materialize_grads(False)
        return tuple(values[name] for name in names)

    @staticmethod
    def backward(ctx, *gradients):
        """With g the gradient that reaches each output, and R = KL(pi || q),

            d z_j = g_logprob (1[j = y] - pi_j) - g_entropy pi_j (log pi_j + entropy)
                    + g_reverse pi_j (log pi_j - log q_j - R) + g_forward (pi_j - q_j)

        which is pi_j (constant + a log pi_j - g_reverse log q_j) - g_forward q_j + g_logprob 1[j = y]. Where only
        log-probs have a gradient, it is -g_logprob times pi_j - 1[j = y].
        """
        hidden, weight, normalizer, other_normalizer, entropy, reverse_kl = ctx.saved_tensors
        own, other, given = ctx.own, ctx.other, dict(zip(ctx.names, gradients, strict=True))
        zero = torch.zeros_like(normalizer)
        g_logprob, g_entropy, g_reverse, g_forward = (
            zero if given.get(name) is None else given[name]
            for name in ("logprobs", "entropy", "reverse_kl", "forward_kl")
        )
        constant = g_forward - g_logprob
        constant = constant - g_entropy * entropy if g_entropy is not zero else constant
        constant = constant - g_reverse * reverse_kl if g_reverse is not zero else constant

        def of_logprobs(rows: slice) -> Tensor:
            column, inside = own.target_columns(rows)
            return block_of_logprobs(own, rows, normalizer, ctx.kept).exp_().scatter_add_(1, column, -inside)

        def of_all(rows: slice) -> Tensor:
            block = block_of_logprobs(own, rows, normalizer, ctx.kept)
            probs = torch.exp(block, out=own.buffer("scratch", rows))
            block.mul_((g_reverse - g_entropy).unsqueeze(1)).add_(constant.unsqueeze(1))
            if g_reverse is not zero or g_forward is not zero:
                other_block = block_of_logprobs(other, rows, other_normalizer, ctx.other_kept)
                block.addcmul_(other_block, g_reverse.unsqueeze(1), value=-1).mul_(probs)
                block.addcmul_(other_block.exp_(), g_forward.unsqueeze(1), value=-1)
            else:
                block.mul_(probs)
            column, inside = own.target_columns(rows)
            return block.scatter_add_(1, column, inside * g_logprob.unsqueeze(1))

        plain = all(g is zero for g in (g_entropy, g_reverse, g_forward))
        factor, function = (-g_logprob, of_logprobs) if plain else (torch.ones_like(zero), of_all)
        found = input_gradients(own, hidden, weight, ctx.needs_input_grad[:2], factor, function)
        other.release()
        return *found, None, None, None, None, None
