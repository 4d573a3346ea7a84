"""Clipped policy surrogates and how their terms become one number. Losses are minimised: J = -loss."""

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rft.objectives.base import Loss, Sum, sequence_means
from megatron_rft.records import Batch


class Clipped(NamedTuple):
    terms: Tensor  # -min(r A, clip(r) A)
    ratio: Tensor  # r
    clipped: Tensor  # 1 where the clip decides, and so the gradient is zero


def clipped_surrogate(log_ratio: Tensor, advantages: Tensor, low: float, high: float) -> Clipped:
    """-min(r A, clip(r, 1 - low, 1 + high) A) with r = exp(log_ratio), elementwise (pipo.txt A.2).

    For r = 1.5, A = 2 and high = 0.2: min(3, 2.4) = 2.4, so the term is -2.4 and it is clipped. Log ratios beyond ±20
    count as ±20: a ratio of 5e8 says enough, and infinity times an advantage of 0 would be no number.
    """
    ratio = log_ratio.clamp(-20.0, 20.0).exp()
    plain, bounded = ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages
    return Clipped(-torch.minimum(plain, bounded), ratio.detach(), (bounded < plain).float().detach())


def aggregate(values: Tensor, batch: Batch, how: str) -> Sum:
    """[R] token terms -> a sum with its denominator.

    sequence_mean: mean over the tokens of a sequence, then over sequences (PPO, GRPO).
    token_mean: mean over all response tokens of the global mini-batch (DAPO).
    """
    if how == "sequence_mean":
        return Sum(sequence_means(values, batch).sum(), "sequences")
    assert how == "token_mean", how
    return Sum((values * batch.response_mask.to(values)).sum(), "response_tokens")


def token_surrogate(logprobs: Tensor, batch: Batch, low: float, high: float, how: str) -> Loss:
    """The surrogate with a ratio per token, on batch.tokens["advantages"] and ["old_logprobs"], all [R].

    Without old_logprobs the step is on-policy: they are this pass's own, so that the ratio is 1 with a gradient.
    """
    old_logprobs = batch.tokens.get("old_logprobs", logprobs.detach()).to(logprobs)
    result = clipped_surrogate(logprobs - old_logprobs, batch.tokens["advantages"].to(logprobs), low, high)
    metrics = {
        "ratio_mean": aggregate(result.ratio, batch, "token_mean"),
        "clip_fraction": aggregate(result.clipped, batch, "token_mean"),
    }
    return Loss({"surrogate": (1.0, aggregate(result.terms, batch, how))}, metrics)
