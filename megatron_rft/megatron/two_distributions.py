"""Compares a trained distribution pi with a frozen one q, from their hidden states and output matrices.

With logits z of pi and u of q at the same positions (both divided by the temperature), and y_t the given token:

    logprobs               log pi(y_t)                                              gradient
    entropy                -sum_j pi_j log pi_j                                     gradient
    reverse_kl             KL(pi || q) = sum_j pi_j (z_j - u_j) - log Z_pi + log Z_q    gradient
    forward_kl             KL(q || pi) = sum_j q_j (u_j - z_j) - log Z_q + log Z_pi     gradient
    jsd                    b KL(q || m) + (1 - b) KL(pi || m), m = b q + (1 - b) pi    gradient
    other_logprobs         log q(y_t)
    extrapolated_logprobs  log softmax((1 + lambda) z - lambda u)[y_t]              (fpa.txt Eq. 4)

All are exact over the whole vocabulary and computed in one pass over blocks of its columns: statistics are merged
online, and a [N, V] tensor never exists. jsd takes a second pass, as the mixture m needs both normalisers. Only the
requested outputs are computed. q never has a gradient; backward recomputes q's logits only if a divergence has a
gradient. Conventions (padding rows, tensor parallelism with two collectives in forward and none in backward, the
gradient of `hidden` not yet summed) are those of vocabulary.py.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rft.megatron.seams import named
from megatron_rft.megatron.vocabulary import Blocks, Differentiable, SoftmaxSums, reduce
from megatron_rft.records import Batch


@dataclass(frozen=True)
class Second:
    """A second distribution without a gradient on `batch`, which has the same responses, possibly after other prompts.
    It is computed with `weights` (a snapshot; None: the current ones) of `actor` (None: of the compared one), unless
    its hidden states are given by `rows` and the output matrix; only ranks on the last pipeline stage read these.
    With `parts`, each of them is the second distribution of its own sequences, `only`."""

    batch: Batch
    weights: list[Tensor] | None = None
    extrapolation: float = 0.0
    mixture: float = 0.5  # its share in the mixture of "jsd"
    actor: Any = None
    rows: Callable[[Tensor], Tensor] | None = None  # indices of response tokens of `batch` -> [n, H] on the host
    output_weight: Tensor | None = None  # [padded V / tp, H] this rank's rows of the output matrix
    only: Tensor | None = None  # [B] bool; None: all sequences
    parts: "tuple[Second, ...]" = ()

    def with_states(self, numbers: Tensor, states: Tensor, output_weight: Tensor) -> "Second":
        """With `states` [n, H] of the response tokens `numbers`; those of other tokens are zero."""
        place = torch.full((len(self.batch.response_ids),), -1)
        place[numbers] = torch.arange(len(numbers))
        states = torch.cat([states, states.new_zeros(1, states.shape[1])])
        return replace(self, rows=lambda tokens: states[place[tokens]], output_weight=output_weight)

    def of(self, numbers: Tensor) -> Tensor:
        """The positions of those of the response tokens `numbers` whose sequences are in `only`."""
        return self.only[self.batch.sequence_ids[numbers]].nonzero().flatten()


WITH_GRADIENT = frozenset({"logprobs", "entropy", "reverse_kl", "forward_kl", "jsd"})
NAMES = WITH_GRADIENT | {"other_logprobs", "extrapolated_logprobs"}


@named(category="second distribution")
def compare(
    hidden: Tensor,  # [N, H] of pi
    weight: Tensor,  # [V/tp, H] this rank's rows
    other_hidden: Tensor,  # [N, H'] of q
    other_weight: Tensor,  # [V/tp, H'] the same rows of the vocabulary
    targets: Tensor,  # [N]
    *,
    names: frozenset[str],
    extrapolation: float = 0.0,
    mixture: float = 0.5,
    **options: Any,
) -> dict[str, Tensor]:
    """Return [N] fp32 for each name of `names`. `options`: those of `Blocks`, for both distributions."""
    assert names <= NAMES, f"unknown: {sorted(names - NAMES)}"
    assert len(weight) == len(other_weight) and len(hidden) == len(other_hidden) and extrapolation >= 0
    own, other = Blocks(hidden, weight, targets, **options), Blocks(other_hidden, other_weight, targets, **options)
    pi, q, extrapolated = _walk(own, other, names, extrapolation)
    normalizers, to_mixture = (pi.normalizer, q.normalizer if q else None), None
    formulas = {
        "logprobs": lambda: pi.logprobs,
        "entropy": lambda: pi.entropy,
        "other_logprobs": lambda: q.logprobs,
        "extrapolated_logprobs": lambda: extrapolated.logprobs,
        "reverse_kl": lambda: pi.moment / pi.total - _difference(pi, q),
        "forward_kl": lambda: q.moment / q.total - _difference(q, pi),
    }
    if "jsd" in names:
        to_mixture, q_to_mixture = _to_mixture(own, other, normalizers, mixture)
        formulas["jsd"] = lambda: (1 - mixture) * to_mixture + mixture * q_to_mixture
    values = {name: formulas[name]() for name in sorted(names)}
    order = sorted(names & WITH_GRADIENT)
    known = {"entropy": values.get("entropy"), "reverse_kl": values.get("reverse_kl"), "to_mixture": to_mixture}
    gradient = partial(_logits_gradient, own, other, normalizers, mixture, known, order)
    differentiable = Differentiable.apply(hidden, weight, own, gradient, *(values[name] for name in order))
    return values | dict(zip(order, differentiable, strict=True))


def _walk(own: Blocks, other: Blocks, names: frozenset[str], extrapolation: float) -> tuple[Any, Any, Any]:
    """Return the `SoftmaxSums` of pi, of q and of the extrapolation; None for those that `names` do not need."""
    reverse, forward, both = "reverse_kl" in names, "forward_kl" in names, "jsd" in names
    of_own = SoftmaxSums(own, dot="entropy" in names, moment=reverse)
    of_other = SoftmaxSums(other, moment=forward) if reverse or forward or both or "other_logprobs" in names else None
    extrapolated = SoftmaxSums(own) if "extrapolated_logprobs" in names else None
    for rows in own:
        columns, logits = own.target_columns(rows), own.logits(rows)
        if of_other or (extrapolated and not other.rounds):
            other_logits = other.logits(rows)
        if extrapolated:
            # The extrapolation amplifies bf16's rounding errors, which always lowers the weights: by 6 % at lambda 20.
            exact = own.exact_logits(rows) if own.rounds else logits
            other_exact = other.exact_logits(rows) if own.rounds else other_logits
            extrapolated.add(torch.mul(other_exact, -extrapolation).add_(exact, alpha=1 + extrapolation), columns)
        gap = logits - other_logits if reverse else None
        other_gap = other_logits - logits if forward else None
        of_own.add(logits, columns, gap)
        if of_other:
            of_other.add(other_logits, columns, other_gap)
    if own.group is not None:
        reduce([sums for sums in (of_own, of_other, extrapolated) if sums is not None], own.group)
    return of_own, of_other, extrapolated


def _difference(own: SoftmaxSums, other: SoftmaxSums) -> Tensor:
    """Return [N] log Z_own - log Z_other, in an order that avoids cancellation if they are close."""
    return (own.top - other.top) + (own.log_total - other.log_total)


def _mixture(log_own: Tensor, log_other: Tensor, share: float) -> Tensor:
    """Return log(share q + (1 - share) pi)."""
    return torch.logaddexp(log_own + math.log1p(-share), log_other + math.log(share))


def _to_mixture(
    own: Blocks, other: Blocks, normalizers: tuple[Tensor, Tensor | None], share: float
) -> tuple[Tensor, Tensor]:
    """Return [N] KL(pi || m) and [N] KL(q || m)."""
    sums = own.hidden.new_zeros(2, len(own.hidden), dtype=own.dtype)
    for rows in own:
        log_own, log_other = own.logprobs(rows, normalizers[0]), other.logprobs(rows, normalizers[1])
        log_mixture = _mixture(log_own, log_other, share)
        for total, log in zip(sums, (log_own, log_other), strict=True):
            total += (log.exp() * (log - log_mixture)).sum(1)
    if own.group is not None:
        dist.all_reduce(sums, group=own.group)
    return sums[0], sums[1]


def _logits_gradient(
    own: Blocks,
    other: Blocks,
    normalizers: tuple[Tensor, Tensor | None],
    mixture: float,
    known: dict[str, Tensor | None],  # values of the forward pass, if it has computed them
    names: list[str],
    *gradients: Tensor | None,
) -> tuple[Tensor, Callable[[slice], Tensor]]:
    """`Differentiable`'s. With g the gradient that reaches each output, and R = KL(pi || q),

        d z_j = g_logprob (1[j = y] - pi_j) - g_entropy pi_j (log pi_j + entropy)
                + g_reverse pi_j (log pi_j - log q_j - R) + g_forward (pi_j - q_j)
                + g_jsd (1 - b) pi_j (log pi_j - log m_j - KL(pi || m))

    which is pi_j (constant + a log pi_j - g_reverse log q_j) - g_forward q_j + g_logprob 1[j = y]. Where only
    log-probs have a gradient, it is -g_logprob times pi_j - 1[j = y].
    """
    normalizer, other_normalizer = normalizers
    given, zero = dict(zip(names, gradients, strict=True)), torch.zeros_like(normalizer)
    g_logprob, g_entropy, g_reverse, g_forward, g_jsd = (
        zero if given.get(name) is None else given[name]
        for name in ("logprobs", "entropy", "reverse_kl", "forward_kl", "jsd")
    )
    if all(g is zero for g in (g_entropy, g_reverse, g_forward, g_jsd)):
        return -g_logprob, partial(own.probs_minus_target, normalizer)
    constant = g_forward - g_logprob
    constant = constant - g_entropy * known["entropy"] if g_entropy is not zero else constant
    constant = constant - g_reverse * known["reverse_kl"] if g_reverse is not zero else constant
    if g_jsd is not zero:
        g_jsd = g_jsd * (1 - mixture)
        constant = constant - g_jsd * known["to_mixture"]

    def of_all(rows: slice) -> Tensor:
        block = own.logprobs(rows, normalizer)
        probs, beside = block.exp(), None
        if any(g is not zero for g in (g_reverse, g_forward, g_jsd)):
            other_block = other.logprobs(rows, other_normalizer)
        if g_jsd is not zero:
            beside = (block - _mixture(block, other_block, mixture)).mul_(g_jsd.unsqueeze(1))
        block.mul_((g_reverse - g_entropy).unsqueeze(1)).add_(constant.unsqueeze(1))
        block = block if beside is None else block.add_(beside)
        if g_reverse is not zero or g_forward is not zero:
            block.addcmul_(other_block, g_reverse.unsqueeze(1), value=-1).mul_(probs)
            block.addcmul_(other_block.exp_(), g_forward.unsqueeze(1), value=-1)
        else:
            block.mul_(probs)
        column, inside = own.target_columns(rows)
        return block.scatter_add_(1, column, inside * g_logprob.unsqueeze(1))

    return torch.ones_like(zero), of_all
