"""The estimators, against the exact KL of small distributions."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rft.objectives.surrogates import ESTIMATORS, clamped_k3, k1, k2, k3, largest_kl


def test_by_hand():
    """log pi - log ref = -ln 2, so ref / pi = 2: k1 = -ln 2, k2 = (ln 2)^2 / 2, k3 = 2 - ln 2 - 1."""
    logprob, ref = torch.tensor(-1.0, dtype=torch.double), torch.tensor(-1.0 + math.log(2), dtype=torch.double)
    assert k1(logprob, ref).item() == pytest.approx(-math.log(2))
    assert k2(logprob, ref).item() == pytest.approx(math.log(2) ** 2 / 2)
    assert k3(logprob, ref).item() == pytest.approx(1 - math.log(2))


@pytest.mark.parametrize("estimate", [k1, *ESTIMATORS.values()])
def test_zero_where_the_policies_agree(estimate):
    logprobs = torch.tensor([-0.5, -20.0])
    assert estimate(logprobs, logprobs).tolist() == [0.0, 0.0]


logits = st.lists(st.floats(-3, 3), min_size=5, max_size=5).map(lambda x: torch.tensor(x, dtype=torch.double))


@settings(max_examples=100)
@given(logits, logits)
def test_k1_and_k3_are_unbiased_and_k2_k3_are_not_negative(policy, reference):
    logprobs, ref = policy.log_softmax(0), reference.log_softmax(0)
    exact = (logprobs.exp() * (logprobs - ref)).sum()
    for estimator in (k1, k3):
        torch.testing.assert_close((logprobs.exp() * estimator(logprobs, ref)).sum(), exact)
    assert (k2(logprobs, ref) >= 0).all() and (k3(logprobs, ref) >= 0).all()


@settings(max_examples=50)
@given(logits, logits)
def test_the_expected_gradient_of_k2_is_the_gradient_of_the_kl(policy, reference):
    """Differentiating a sampled term ignores how sampling depends on the weights; k2's gradient is right
    nevertheless."""
    policy.requires_grad_()
    logprobs, ref = policy.log_softmax(0), reference.log_softmax(0)
    (exact,) = torch.autograd.grad((logprobs.exp() * (logprobs - ref)).sum(), policy, retain_graph=True)
    (sampled,) = torch.autograd.grad((logprobs.detach().exp() * k2(logprobs, ref)).sum(), policy)
    torch.testing.assert_close(sampled, exact)


def test_k3_keeps_its_digits_near_zero():
    """d^2 / 2 for a small difference: 5e-9 for 1e-4, where exp(d) - d - 1 would be rounding noise in float32."""
    logprobs = torch.tensor([-1e-4])
    assert k3(logprobs, torch.zeros(1)).item() == pytest.approx(5e-9, rel=1e-2)


@pytest.mark.parametrize("logprob, value, gradient", [(-25, 10.0, 0.0), (-95, 10.0, 0.0), (-2.5, 4.389056, -6.389056)])
def test_k3_of_an_unlikely_token_is_bounded(logprob, value, gradient):
    """With a reference of -0.5: e^24.5 and e^94.5 without bounds; with them e^2 - 2 - 1, with gradient 1 - e^2."""
    logprobs = torch.tensor([float(logprob)], requires_grad=True)
    found = clamped_k3(logprobs, torch.tensor([-0.5]))
    found.sum().backward()
    assert found.item() == pytest.approx(value) and logprobs.grad.item() == pytest.approx(gradient)


def test_the_largest_is_that_before_the_value_is_bounded():
    """Differences 2, 3 and 30, of which the last is masked; 0 without a token."""
    logprobs, ref = torch.tensor([-3.0, -4.0, -31.0]), torch.full((3,), -1.0)
    assert largest_kl(logprobs, ref, torch.tensor([1.0, 1.0, 0.0])) == pytest.approx(math.exp(3) - 4)
    assert largest_kl(logprobs, ref, torch.ones(3)) == pytest.approx(math.exp(20) - 21)
    assert largest_kl(logprobs, ref, torch.zeros(3)) == 0.0
