"""Group-relative credit (pipo.txt Eq. 3 and 4.1)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rft.objectives.advantages import group_normalised, group_relative, to_tokens

ROOT3 = 3**0.5


def test_one_right_of_four():
    """mean 1/4, population std sqrt(3)/4: the right one gets (3/4) / (sqrt(3)/4) = sqrt(3), the others -1/sqrt(3)."""
    advantages = group_relative(torch.tensor([0.0, 1.0, 0.0, 0.0]), torch.tensor([5, 5, 5, 5]))
    torch.testing.assert_close(advantages, torch.tensor([-1 / ROOT3, ROOT3, -1 / ROOT3, -1 / ROOT3]))


def test_groups_do_not_see_each_other_and_may_be_interleaved():
    advantages = group_relative(torch.tensor([1.0, 7.0, 0.0, 9.0, 3.0]), torch.tensor([8, 2, 8, 2, 4]))
    assert advantages.tolist() == [1.0, -1.0, -1.0, 1.0, 0.0]


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3, -1e30])
@pytest.mark.parametrize("size", [1, 3, 7])
def test_equal_rewards_give_exact_zeros(reward, size):
    advantages = group_relative(torch.full((size,), reward), torch.zeros(size, dtype=torch.long))
    assert advantages.tolist() == [0.0] * size and advantages.dtype == torch.float32


def test_no_sequences():
    nothing = torch.zeros(0)
    assert len(group_relative(nothing, nothing.long())) == 0 and len(group_normalised(nothing, nothing.long())) == 0


rewards = st.lists(st.sampled_from([-1.0, -0.6, 0.0, 0.25, 1.0]), min_size=2, max_size=16)


@settings(max_examples=100, deadline=None)
@given(rewards, st.floats(0.01, 100), st.floats(-100, 100))
def test_mean_zero_std_one_and_blind_to_affine_changes(values, scale, shift):
    """Property 2. The scale is positive; float32 rewards of size 100 leave about 1e-5 of relative error."""
    values = torch.tensor(values)
    group = torch.zeros(len(values), dtype=torch.long)
    advantages = group_relative(values, group)
    if values.min() < values.max():
        assert advantages.mean().item() == pytest.approx(0, abs=1e-6)
        assert advantages.std(correction=0).item() == pytest.approx(1, abs=1e-6)
    changed = group_relative(values.double() * scale + shift, group)
    torch.testing.assert_close(changed, advantages, rtol=1e-5, atol=1e-5)


@settings(max_examples=50, deadline=None)
@given(rewards, st.permutations(range(16)))
def test_order_of_sequences_does_not_matter(values, order):
    values, order = torch.tensor(values), torch.tensor([i for i in order if i < len(values)])
    group = torch.arange(len(values)) % 3
    torch.testing.assert_close(group_relative(values[order], group[order]), group_relative(values, group)[order])


def test_attributions_of_a_group_add_up_to_its_size_in_absolute_value():
    """G A_i / sum |A_j| with A = (3, -1, -1, -1) and G = 4: (2, -2/3, -2/3, -2/3). The scale of A drops out."""
    advantages = torch.tensor([3.0, -1.0, -1.0, -1.0])
    expected = torch.tensor([2.0, -2 / 3, -2 / 3, -2 / 3])
    for scale in (1.0, 0.01, 50.0):
        torch.testing.assert_close(group_normalised(scale * advantages, torch.zeros(4)), expected)


def test_a_group_of_zeros_stays_zero():
    normalised = group_normalised(torch.tensor([0.0, 1.0, 0.0, -1.0]), torch.tensor([1, 2, 1, 2]))
    assert normalised.tolist() == [0.0, 1.0, 0.0, -1.0]


def test_every_token_gets_its_sequences_value(make_batch):
    batch = make_batch([3, 1, 2], [0, 0, 0], [0, 0, 0])
    assert to_tokens(torch.tensor([5.0, 6.0, 7.0]), batch).tolist() == [5, 5, 5, 6, 7, 7]
