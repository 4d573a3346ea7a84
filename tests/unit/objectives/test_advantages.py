"""Advantages: group-relative (pipo.txt Eq. 3 and 4.1) and variants, generalised advantages, whitening, penalties."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rft.objectives.advantages import (
    at_last_token,
    degenerate,
    gae,
    group_centred,
    group_normalised,
    group_relative,
    leave_one_out,
    overlong_penalty,
    rewards_to_go,
    to_tokens,
    whiten,
    without_turns,
)
from megatron_rft.records import Batch

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


@pytest.mark.parametrize("credit", [group_relative, group_centred, leave_one_out])
def test_rewards_that_differ_by_rounding_are_equal(credit):
    """0.05 + 0.3 is one unit in the last place of fp32 from 0.35, which the deviation would scale to sqrt(3)."""
    rewards, group = torch.tensor([0.05, 0.35, 0.35, 0.35]) + torch.tensor([0.3, 0, 0, 0]), torch.zeros(4).long()
    assert rewards[0] != rewards[1] and not credit(rewards, group).any() and degenerate(rewards, group).all()
    assert not credit(1e3 * rewards, group).any()
    assert credit(torch.tensor([0.35, 0.350003]), group[:2]).all()


def test_no_sequences():
    nothing = torch.zeros(0)
    assert len(group_relative(nothing, nothing.long())) == 0 and len(group_normalised(nothing, nothing.long())) == 0


rewards = st.lists(st.sampled_from([-1.0, -0.6, 0.0, 0.25, 1.0]), min_size=2, max_size=16)


@settings(max_examples=100)
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


@settings(max_examples=50)
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


def test_centred_and_left_out_by_hand():
    """Rewards 1, 0, 0, 3 with mean 1: R - mean, and 4/3 of it, since the others' mean is (4 - R) / 3. One alone: 0."""
    rewards, group = torch.tensor([1.0, 0.0, 0.0, 3.0, 5.0]), torch.tensor([2, 2, 2, 2, 9])
    assert group_centred(rewards, group).tolist() == [0.0, -1.0, -1.0, 2.0, 0.0]
    torch.testing.assert_close(leave_one_out(rewards, group), torch.tensor([0.0, -4 / 3, -4 / 3, 8 / 3, 0.0]))


def test_groups_that_agree():
    rewards, group = torch.tensor([0.1, 0.1, 0.1, 1.0, 0.0, 1.0]), torch.tensor([0, 0, 0, 1, 1, 3])
    assert degenerate(rewards, group).tolist() == [True, True, True, False, False, True]


def test_overlong_penalty_by_hand():
    """Limit 10, buffer 4: free up to 6, a quarter a token from there, -1 at the limit and no more beyond it."""
    lengths = torch.tensor([0, 6, 7, 9, 10, 12])
    assert overlong_penalty(lengths, 10, 4).tolist() == [0.0, 0.0, -0.25, -0.75, -1.0, -1.0]


def test_gae_by_hand(make_batch):
    """Reward 1 at the end, V = (0.5, 0.25), gamma 1, lambda 0.5: delta = (-0.25, 0.75), A = (-0.25 + 0.375, 0.75)."""
    batch = make_batch([2, 1, 0], [0, 1, 2], [1.0, 0.0, 1.0])
    rewards = at_last_token(batch.sequences["rewards"], batch)
    assert rewards.tolist() == [0.0, 1.0, 0.0]
    advantages, returns = gae(rewards, torch.tensor([0.5, 0.25, 0.5]), batch, gamma=1.0, lam=0.5)
    assert advantages.tolist() == [0.125, 0.75, -0.5] and returns.tolist() == [0.625, 1.0, 0.0]


def test_tokens_of_others_are_skipped_over(make_batch):
    """A tool wrote the middle token, so the two outer ones are neighbours."""
    batch = make_batch([3], [0], [1.0], response_mask=[1, 0, 1])
    rewards = at_last_token(torch.tensor([1.0]), batch)
    advantages, returns = gae(rewards, torch.tensor([0.5, 99.0, 0.25]), batch, gamma=1.0, lam=0.5)
    assert advantages.tolist() == [0.125, 0.0, 0.75] and returns.tolist() == [0.625, 0.0, 1.0]
    assert rewards_to_go(torch.tensor([1.0, 50.0, 2.0]), batch, 0.5).tolist() == [2.0, 0.0, 2.0]


@settings(max_examples=60)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=5), st.floats(0, 1), st.floats(0, 1), st.integers(0, 99))
def test_gae_is_its_definition(make_batch, lens, gamma, lam, seed):
    """Property 6: A_t = sum_l (gamma lam)^l delta_{t+l}, summed separately for each t."""
    batch = make_batch(lens, list(range(len(lens))), [0.0] * len(lens))
    generator = torch.Generator().manual_seed(seed)
    rewards, values = (torch.randn(sum(lens), generator=generator) for _ in range(2))
    expected, start = [], 0
    for length in lens:
        r, v = rewards[start : start + length].tolist(), [*values[start : start + length].tolist(), 0.0]
        delta = [r[t] + gamma * v[t + 1] - v[t] for t in range(length)]
        expected += [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, length)) for t in range(length)]
        start += length
    advantages, returns = gae(rewards, values, batch, gamma, lam)
    torch.testing.assert_close(advantages, torch.tensor(expected), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(returns, advantages + values, rtol=1e-5, atol=1e-5)


def test_whitening_by_hand():
    """1 and 3 have mask 1: mean 2, population std 1. Equal values and no values give 0."""
    assert whiten(torch.tensor([1.0, 50.0, 3.0]), torch.tensor([1.0, 0.0, 1.0])).tolist() == [-1.0, 0.0, 1.0]
    assert whiten(torch.full((3,), 0.1), torch.ones(3)).tolist() == [0.0, 0.0, 0.0]
    assert whiten(torch.ones(2), torch.zeros(2)).tolist() == [0.0, 0.0]


def test_a_score_is_the_reward_without_those_of_turns():
    """What stands on an environment's tokens is no reward."""
    batch = Batch.of([[1], [1]], [[2, 3, 4], [5]])
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0])
    batch = batch.with_tokens(turn_rewards=torch.tensor([0.5, 9.0, 0.25, 0.0]), response_mask=mask)
    assert without_turns(torch.tensor([1.0, 2.0]), batch).tolist() == [0.25, 2.0]
