"""Estimators of KL(pi_theta || pi_ref) from log-probs of sampled tokens (Schulman, "Approximating KL divergence")."""

import torch
from torch import Tensor


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


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}
