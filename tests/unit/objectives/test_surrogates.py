"""The clipped surrogates and their aggregations (pipo.txt A.2), and the weights of rollouts from another engine."""

import math

import pytest
import torch

from megatron_rft.objectives.base import counts
from megatron_rft.objectives.surrogates import aggregate, clipped_surrogate, importance_weights
from tests.made import made


@pytest.mark.parametrize(
    "ratio, advantage, term, clipped, gradient",
    [
        (1.0, 2.0, -2.0, 0, -2.0),  # inside: -r A
        (1.5, 2.0, -2.4, 1, 0.0),  # min(3, 1.2 * 2): held back
        (0.5, 2.0, -1.0, 0, -1.0),  # min(1, 0.8 * 2): a good token that became rare is pulled back up
        (1.5, -2.0, 3.0, 0, 3.0),  # min(-3, -2.4): a bad token that became common is pushed down
        (0.5, -2.0, 1.6, 1, 0.0),  # min(-1, -1.6)
        (1.5, 0.0, 0.0, 0, 0.0),
        (1.2, -2.0, 2.4, 0, 2.4),  # at a bound nothing is held back yet
        (0.8, -2.0, 1.6, 0, 1.6),
    ],
)
def test_by_hand(ratio, advantage, term, clipped, gradient):
    """d(-r A)/d(log r) = -r A where no clip bound applies."""
    log_ratio = torch.tensor([math.log(ratio)], requires_grad=True)
    result = clipped_surrogate(log_ratio, torch.tensor([advantage]), 0.2, 0.2)
    result.terms.sum().backward()
    assert result.terms.item() == pytest.approx(term) and log_ratio.grad.item() == pytest.approx(gradient)
    assert result.clipped.item() == clipped and result.ratio.item() == pytest.approx(ratio)
    assert not result.ratio.requires_grad and not result.clipped.requires_grad


def test_the_two_bounds_are_apart():
    log_ratio = torch.tensor([1.25, 0.75]).log()
    result = clipped_surrogate(log_ratio, torch.tensor([1.0, -1.0]), low=0.3, high=0.2)
    torch.testing.assert_close(result.terms, torch.tensor([-1.2, 0.75]))
    assert result.clipped.tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    "how, mean",
    [
        ("sequence_mean", 7.0),  # means 2, 10 and 9
        ("token_mean", 5.0),  # 25 / 5
        ("group_mean", 6.5),  # the first group's tokens 16 / 4, the second's 9
        ("sequence_sum", 25 / 3),  # sums 6, 10 and 9
        ("constant", 25 / 12),  # the same over 4 tokens each
    ],
)
def test_aggregation_by_hand(make_batch, how, mean):
    """Terms (1, 2, 3) and (10) of one prompt, (9) of another, and an empty response, which does not count."""
    batch = make_batch([3, 1, 1, 0], [0, 0, 1, 1], [0, 0, 0, 0]).with_sequences(group_tokens=torch.tensor([4, 4, 1, 1]))
    result = aggregate(torch.tensor([1.0, 2.0, 3.0, 10.0, 9.0]), batch, how, constant=4)
    assert result.total.item() / counts(batch)[result.per] == pytest.approx(mean)


def test_masked_tokens_and_sequences_do_not_count(make_batch):
    """The mask leaves (1, 3), nothing of the second, (10): (2 + 10) / 2 and 14 / 3. Masked tokens have no gradient."""
    batch = make_batch([3, 2, 1], [0, 0, 0], [0, 0, 0], response_mask=[1, 0, 1, 0, 0, 1])
    for how, mean in (("sequence_mean", 6.0), ("token_mean", 14 / 3)):
        values = torch.tensor([1.0, 2.0, 3.0, 50.0, 60.0, 10.0], requires_grad=True)
        result = aggregate(values, batch, how)
        assert result.total.item() / counts(batch)[result.per] == pytest.approx(mean)
        result.total.backward()
        assert (values.grad != 0).tolist() == [True, False, True, False, False, True]


def test_gradient_at_the_sampling_policy(make_batch):
    """At ratio 1 the gradient by each log-prob is -A / (|y| N): here N = 2, |y| = 2 and 1, A = 1 and -1."""
    logprobs = torch.tensor([-0.1, -2.0, -0.5], requires_grad=True)
    batch = make_batch([2, 1], [0, 0], [1, 0], advantages=[1, 1, -1], old_logprobs=logprobs.detach())
    loss = made("grpo").surrogate({"logprobs": logprobs}, batch)
    loss.mean(counts(batch)).backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([-0.25, -0.25, 0.5]))


def test_metrics_are_token_means(make_batch):
    """Ratios 1, 1.5, 0.5, 1 with A = 1: only the second is clipped."""
    ratios = torch.tensor([1.0, 1.5, 0.5, 1.0])
    batch = make_batch([3, 1], [0, 0], [1, 0], advantages=[1.0] * 4, old_logprobs=[0.0] * 4)
    logged = made("grpo").surrogate({"logprobs": ratios.log()}, batch).logged(counts(batch))
    means = {name: mean.item() for name, mean in logged.items()}
    assert means["clip_fraction"] == 0.25 and means["ratio_mean"] == pytest.approx(1.0)
    assert means["surrogate"] == pytest.approx((-(1 + 1.2 + 0.5) / 3 - 1) / 2)


@pytest.mark.parametrize(
    "ratio, advantage, term, clipped",
    [
        (4.0, -1.0, 3.0, 1),  # min(-4, -1.2) = -4, but no more than 3 times
        (2.0, -1.0, 2.0, 0),
        (0.5, -1.0, 0.8, 1),
        (4.0, 1.0, -1.2, 1),  # a positive advantage is not touched
    ],
)
def test_dual_clip_by_hand(ratio, advantage, term, clipped):
    log_ratio = torch.tensor([math.log(ratio)], requires_grad=True)
    result = clipped_surrogate(log_ratio, torch.tensor([advantage]), 0.2, 0.2, dual_clip=3.0)
    result.terms.sum().backward()
    assert result.terms.item() == pytest.approx(term) and result.clipped.item() == clipped
    assert (log_ratio.grad.item() == 0) == bool(clipped)


def test_gspo_has_one_ratio_per_response(make_batch):
    """Ratios 2 and 1/2 in one response give 1; a single 4 is clipped at 1.5: mean of -1 and -1.5 with A = 1. Both
    tokens of the first get half of its gradient, -A r / 2."""
    logprobs = torch.tensor([2.0, 0.5, 4.0]).log().requires_grad_()
    batch = make_batch([2, 1], [0, 0], [0, 0], advantages=[1.0] * 3, old_logprobs=[0.0] * 3)
    loss = made("gspo", clip_low=0.5, clip_high=0.5).surrogate({"logprobs": logprobs}, batch)
    mean = loss.mean(counts(batch))
    mean.backward()
    assert mean.item() == pytest.approx(-1.25)
    torch.testing.assert_close(logprobs.grad, torch.tensor([-0.25, -0.25, 0.0]))


def test_cispo_keeps_the_gradient_of_clipped_tokens(make_batch):
    """Ratio 3 is clipped to 1.5, and the gradient is still -1.5 A; a ratio of 0.5 has no lower bound."""
    logprobs = torch.tensor([3.0, 0.5]).log().requires_grad_()
    batch = make_batch([2], [0], [0], advantages=[2.0, 1.0], old_logprobs=[0.0, 0.0])
    loss = made("cispo", clip_high=0.5).surrogate({"logprobs": logprobs}, batch)
    loss.mean(counts(batch)).backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([-1.5, -0.25]))
    assert loss.metrics["clip_fraction"].total.item() == 1


def test_importance_weights_by_hand(make_batch):
    """Trainer over engine: 4, 1, 1/4 with a cap of 2."""
    batch = make_batch([3], [0], [0], old_logprobs=[0.0] * 3, rollout_logprobs=torch.tensor([0.25, 1.0, 4.0]).log())
    found = {how: importance_weights(torch.zeros(3), batch, how, 2.0) for how in ("truncated", "masked")}
    torch.testing.assert_close(found["truncated"], torch.tensor([2.0, 1.0, 0.25]))
    torch.testing.assert_close(found["masked"], torch.tensor([0.0, 1.0, 0.0]))
