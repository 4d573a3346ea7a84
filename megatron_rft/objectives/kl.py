"""Estimators of KL(pi_theta || pi_ref) from log-probs of sampled tokens (Schulman, "Approximating KL divergence")."""

import torch
from torch import Tensor

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


def largest(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> float:
    """The largest k3 of the tokens with mask 1, before its value is clamped; 0 without any. All inputs [R]."""
    difference = (ref_logprobs - logprobs).double()[mask > 0].clamp(-DIFFERENCE_BOUND, DIFFERENCE_BOUND)
    return (torch.expm1(difference) - difference).max().item() if len(difference) else 0.0


ESTIMATORS = {"k1": k1, "k2": k2, "k3": clamped_k3}
