"""The terms of policy losses and their aggregation: clipped surrogates, estimates of the KL to the reference, and the
train-inference mismatch. Losses are minimised: J = -loss.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rft.objectives.base import Loss, Sum, sequence_means, sequence_sums
from megatron_rft.records import Batch, like, send

LOG_RATIO_BOUND = 20.0  # bounds the ratio by 5e8: infinity times an advantage of 0 would be NaN


class Clipped(NamedTuple):
    terms: Tensor  # -min(r A, clip(r) A)
    ratio: Tensor  # r
    clipped: Tensor  # 1 where a clip bound applies, so the gradient is zero


def clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, low: float, high: float, dual_clip: float | None = None
) -> Clipped:
    """-min(r A, clip(r, 1 - low, 1 + high) A) with r = exp(log_ratio), elementwise (pipo.txt A.2).

    For r = 1.5, A = 2 and high = 0.2: min(3, 2.4) = 2.4, so the term is -2.4 and is clipped. With `dual_clip` c > 1
    the term is -max(min(...), c A) where A < 0 (arXiv:1912.09729 Eq. 5).
    """
    ratio = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    plain, bounded = ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages
    terms, clipped = -torch.minimum(plain, bounded), bounded < plain
    if dual_clip is not None:
        ceiling = -dual_clip * advantages
        beyond = (advantages < 0) & (terms > ceiling)
        terms, clipped = torch.where(beyond, ceiling, terms), clipped | beyond
    return Clipped(terms, ratio.detach(), clipped.float().detach())


def sequence_log_ratio(log_ratio: Tensor, batch: Batch) -> Tensor:
    """[R] -> [R] each sequence's mean on all its tokens: the log of GSPO's ratio (pipo.txt A.2)."""
    return sequence_means(log_ratio, batch)[send(batch.sequence_ids, log_ratio.device)]


def aggregate(values: Tensor, batch: Batch, how: str, constant: float = 1.0) -> Sum:
    """[R] token terms -> a sum with its denominator.

    sequence_mean: mean over the tokens of a sequence, then over sequences (PPO, GRPO).
    token_mean: mean over all response tokens of the global mini-batch.
    group_mean: mean over all tokens of a prompt's responses, then over prompts (DAPO).
    sequence_sum: sum over the tokens of a sequence, then mean over sequences.
    constant: sequence_sum divided by `constant` (Dr. GRPO).
    """
    if how == "sequence_mean":
        return Sum(sequence_means(values, batch).sum(), "sequences")
    if how in ("sequence_sum", "constant"):
        total = sequence_sums(values, batch).sum()
        return Sum(total / constant if how == "constant" else total, "sequences")
    if how == "group_mean":
        shares = sequence_sums(values, batch) / like(batch.sequences["group_tokens"], values).clamp(min=1)
        return Sum(shares.sum(), "groups")
    assert how == "token_mean", how
    return Sum((values * like(batch.response_mask, values)).sum(), "response_tokens")


def log_ratio(logprobs: Tensor, batch: Batch) -> Tensor:
    """log(pi / pi_old) [R]. Without old_logprobs the step is on-policy: this pass's own log-probs, detached, replace
    them, so the ratio is 1 and has a gradient."""
    return logprobs - like(batch.tokens.get("old_logprobs", logprobs.detach()), logprobs)


def importance_weights(logprobs: Tensor, batch: Batch, how: str, cap: float) -> Tensor:
    """[R] w = pi_old / pi_engine per token, which corrects for the train-inference mismatch.

    truncated: min(w, cap). masked: w where 1 / cap <= w <= cap, else 0.
    """
    old_logprobs = like(batch.tokens.get("old_logprobs", logprobs.detach()), logprobs)
    weights = (old_logprobs - like(batch.tokens["rollout_logprobs"], logprobs)).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    weights = weights.exp()
    if how == "truncated":
        return weights.clamp(max=cap)
    assert how == "masked", how
    return weights * ((weights <= cap) & (weights >= 1 / cap))


def surrogate_loss(result: Clipped, batch: Batch, how: str, constant: float = 1.0) -> Loss:
    terms = {"surrogate": (1.0, aggregate(result.terms, batch, how, constant))}
    metrics = {"ratio_mean": result.ratio, "clip_fraction": result.clipped}
    return Loss(terms, {name: aggregate(values, batch, "token_mean") for name, values in metrics.items()})


BOUND = 0.1  # nats; mismatch/share counts tokens whose log-probs differ by more


def mismatch(rollout_logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> dict[str, float]:
    """Over the response tokens: mismatch/kl, the k3 estimate of KL(engine || trainer); mismatch/max, the largest
    |difference| of log-probs; mismatch/share, the share of tokens whose difference exceeds BOUND. All inputs [R].
    """
    difference = (old_logprobs - rollout_logprobs).double()[mask > 0]
    if not len(difference):
        return {"mismatch/kl": 0.0, "mismatch/max": 0.0, "mismatch/share": 0.0}
    return {
        "mismatch/kl": (difference.expm1() - difference).mean().item(),
        "mismatch/max": difference.abs().max().item(),
        "mismatch/share": (difference.abs() > BOUND).double().mean().item(),
    }


def mismatch_sums(logprobs: Tensor, batch: Batch) -> dict[str, Sum]:
    """The same without the maximum, from an on-policy training pass: its log-probs are those before the step."""
    difference = logprobs.detach() - like(batch.tokens["rollout_logprobs"], logprobs)
    return {
        "mismatch/kl": aggregate(difference.expm1() - difference, batch, "token_mean"),
        "mismatch/share": aggregate((difference.abs() > BOUND).float(), batch, "token_mean"),
    }


# ---- estimates of KL(pi_theta || pi_ref) from log-probs of sampled tokens (Schulman, "Approximating KL divergence")

DIFFERENCE_BOUND, VALUE_BOUND = 20.0, 10.0


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """log pi - log ref: unbiased, may be negative."""
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """(log pi - log ref)^2 / 2: biased, never negative; its gradient is that of the KL."""
    return 0.5 * (logprobs - ref_logprobs) ** 2


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """exp(ref - log pi) - (ref - log pi) - 1: unbiased, never negative."""
    difference = ref_logprobs - logprobs
    return torch.expm1(difference) - difference


def clamped_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """k3 with the difference clamped to +-20 and the value to 10, as in verl, for losses and penalties.

    Without the bounds a token at -25 whose reference is at -0.5 has a gradient of 4e10, and one at -95 overflows fp32.
    Beyond a bound the gradient is 0.
    """
    difference = (ref_logprobs - logprobs).clamp(-DIFFERENCE_BOUND, DIFFERENCE_BOUND)
    return (torch.expm1(difference) - difference).clamp(max=VALUE_BOUND)


def largest_kl(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> float:
    """The largest k3 of the tokens with mask 1, before its value is clamped; 0 without any. All inputs [R]."""
    difference = (ref_logprobs - logprobs).double()[mask > 0].clamp(-DIFFERENCE_BOUND, DIFFERENCE_BOUND)
    return (torch.expm1(difference) - difference).max().item() if len(difference) else 0.0


ESTIMATORS = {"k2": k2, "k3": clamped_k3}  # in the loss
