"""eta(p): closed forms, both ends, and the Monte Carlo of a group-relative gradient."""

import math

import pytest
import torch

from examples.pipo.scaling import boundary_scaling, scaling
from megatron_rft.objectives.advantages import group_relative


def at(p: float, size: int) -> float:
    return scaling(torch.tensor([p], dtype=torch.float64), size).item()


def plainly(p: float, size: int) -> float:
    """Theorem 6.2 literally."""
    total = sum(math.sqrt(k * (size - k)) * math.comb(size, k) * p**k * (1 - p) ** (size - k) for k in range(1, size))
    return total / (size * p * (1 - p) * (1 - p**size - (1 - p) ** size))


def test_by_hand():
    """G = 2: one is right and one wrong, sqrt(1) / (2 p (1-p)). G = 3: sqrt(2) either way, over 3 p (1-p)."""
    assert at(0.5, 2) == pytest.approx(2.0) and at(0.1, 2) == pytest.approx(1 / 0.18)
    assert at(0.25, 3) == pytest.approx(math.sqrt(2) / (3 * 0.1875))


@pytest.mark.parametrize("size", [2, 3, 8, 64])
@pytest.mark.parametrize("p", [0.01, 0.3, 0.5, 0.77, 0.99])
def test_is_the_theorem_where_that_can_be_computed(size, p):
    assert at(p, size) == pytest.approx(plainly(p, size), rel=1e-10)
    assert at(p, size) == pytest.approx(at(1 - p, size), rel=1e-10)


@pytest.mark.parametrize("size", [2, 8, 128, 5000])
def test_limits(size):
    ends = torch.tensor([1e-12, 1e-300, 1 - 1e-12], dtype=torch.float64)
    torch.testing.assert_close(scaling(ends, size), boundary_scaling(ends, size), rtol=1e-5, atol=0)
    assert at(0.3, 20_000) == pytest.approx((0.3 * 0.7) ** -0.5, rel=1e-3)  # many responses: the true std


@pytest.mark.parametrize("p, size", [(0.1, 8), (0.5, 4), (0.9, 8)])
def test_monte_carlo_of_the_group_relative_gradient(p, size):
    """One logit, p = sigmoid(theta): grad log pi is 1 - p for a right response and -p for a wrong one, and grad p is
    p (1-p). The mean over 50,000 groups that do not agree has a standard error of about half a percent."""
    right = (torch.rand(50_000, size, generator=torch.Generator().manual_seed(size)) < p).double()
    right = right[(right.sum(1) > 0) & (right.sum(1) < size)]
    group = torch.arange(len(right)).repeat_interleave(size)
    advantages = group_relative(right.flatten(), group).double().view(-1, size)
    gradient = (advantages * (right - p)).mean()
    assert gradient.item() / (p * (1 - p)) == pytest.approx(at(p, size), rel=0.02)


def test_what_has_no_answer_is_refused():
    with pytest.raises(ValueError, match="group_size: 1"):
        at(0.5, 1)
    for p in (0.0, 1.0, -0.1, math.nan):
        with pytest.raises(ValueError, match="strictly between 0 and 1"):
            at(p, 8)
