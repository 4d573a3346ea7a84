"""The distribution of sequences over micro-batches: each once, within the budget, balanced, groups together."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rft.megatron.balance import Costs, plan, plan_within
from megatron_rft.records import Batch


def batch(*lengths: tuple[int, int]) -> Batch:
    """Sequences of (prompt, response) lengths, with different prompts."""
    return Batch.of([[i] * p for i, (p, _) in enumerate(lengths)], [[0] * r for _, r in lengths])


def groups(*shapes: tuple[int, list[int]]) -> Batch:
    """A prompt of this many tokens, and responses of these lengths."""
    prompts = [[i] * prompt for i, (prompt, responses) in enumerate(shapes) for _ in responses]
    return Batch.of(prompts, [[0] * length for _, responses in shapes for length in responses])


@given(
    lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 40)), min_size=1, max_size=30),
    dp=st.integers(1, 4),
    multiple=st.sampled_from([1, 2, 4]),
)
def test_plan_holds_every_sequence_once_within_the_budget(lengths, dp, multiple):
    whole = batch(*lengths)
    shares = plan(whole, dp, token_budget=80, count_multiple=multiple)
    assert len(shares) == dp and len({len(share) for share in shares}) == 1
    assert len(shares[0]) % multiple == 0
    placed = torch.cat([index for share in shares for index in share])
    assert sorted(placed.tolist()) == list(range(len(lengths)))
    assert all(int((whole.lengths[index] - 1).sum()) <= 80 for share in shares for index in share)


def test_plan_balances_tokens_over_ranks():
    whole = batch(*[(4, n) for n in range(1, 65)])
    loads = [sum(int(whole.lengths[i].sum()) for i in share) for share in plan(whole, 4, token_budget=400)]
    assert max(loads) - min(loads) <= 0.02 * sum(loads)


def test_units_stay_together():
    whole = batch(*[(2, 5)] * 8).with_sequences(unit=torch.tensor([0, 1, 2, 3, 0, 1, 2, 3]))
    for share in plan(whole, 2, token_budget=12):
        for index in share:
            assert sorted(index.tolist()) == sorted(set(index.tolist()) & set(range(8)))
            assert len(index) == 2 and index[1] - index[0] == 4


shapes = st.lists(st.tuples(st.integers(1, 20), st.lists(st.integers(1, 40), min_size=1, max_size=9)), min_size=1)


def test_a_group_is_cut_if_that_fills_the_pipeline():
    """One micro-batch of 50 tokens takes as long as four of 50 in a pipeline of four stages: four of 20 are faster."""
    (share,) = plan(groups((10, [11] * 4)), 1, token_budget=1000, count_multiple=4, share_prompts=True)
    assert [len(index) for index in share] == [1] * 4


def test_the_last_token_of_each_segment_costs_nothing():
    """A prompt of 2 tokens, and two segments of 2 and 3 that end with a token that is not fed; the second's prompt is
    one token of the five."""
    episode = Batch.of([[1, 2]], [[3, 4, 5, 6, 7]]).with_segments([[0, 0, -1, 1, 1]])
    assert Costs(episode, share_prompts=False)([0]) == 2 + 3


@pytest.mark.parametrize("shared", [False, True])
def test_what_is_beyond_the_budget_is_alone_and_costs_the_others_nothing(shared):
    whole = groups((10, [200, *[5] * 8]), (4, [6] * 3))
    (share,) = plan(whole, 1, token_budget=80, share_prompts=shared)
    loads = sorted(Costs(whole, shared)(index.tolist()) for index in share)
    assert [0] in [index.tolist() for index in share]
    assert len(share) == (2 if shared else 3) and max(loads[:-1]) <= 80 and loads[-1] == 209


@given(shapes=shapes, dp=st.integers(1, 4), multiple=st.sampled_from([1, 2]))
def test_a_plan_of_shared_prompts_holds_every_sequence_once_within_the_budget(shapes, dp, multiple):
    whole = groups(*shapes)
    shares, cost = plan(whole, dp, 60, multiple, share_prompts=True), Costs(whole, share_prompts=True)
    assert len({len(share) for share in shares}) == 1 and len(shares[0]) % multiple == 0
    placed = torch.cat([index for share in shares for index in share])
    assert sorted(placed.tolist()) == list(range(len(whole)))
    assert all(cost(index.tolist()) <= 60 for share in shares for index in share)


def test_costs_count_a_prompt_once():
    whole = groups((10, [5, 1]), (7, [3]))
    assert Costs(whole, share_prompts=True)([0, 1, 2]) == 10 + 4 + 0 + 7 + 2
    assert Costs(whole, share_prompts=False)([0, 1, 2]) == 10 + 4 + 10 + 7 + 2


def test_a_group_stays_in_one_micro_batch_where_it_fits():
    """Four groups of 100 + 4 x 10 tokens in micro-batches of 300: two each, not mixed."""
    whole = groups(*[(100, [11] * 4)] * 4)
    (share,) = plan(whole, 1, 300, share_prompts=True)
    assert [len(index) for index in share] == [8, 8]
    assert all(len(set((index // 4).tolist())) == 2 for index in share)
    assert len(plan(whole, 1, 300)[0]) > 2


def test_a_group_that_does_not_fit_is_cut_between_responses():
    """100 + 8 x 10 tokens in micro-batches of 150: two parts of four responses."""
    (share,) = plan(groups((100, [11] * 8)), 1, 150, share_prompts=True)
    assert [len(index) for index in share] == [4, 4]


def test_a_pair_in_a_group_is_not_torn():
    whole = groups((10, [6] * 4)).with_sequences(unit=torch.tensor([0, 1, 0, 1]))
    (share,) = plan(whole, 1, 20, share_prompts=True)
    assert sorted(index.tolist() for index in share) == [[0, 2], [1, 3]]


def test_a_group_is_cut_for_ranks_that_would_have_nothing_to_do():
    """One group of 10 + 8 x 40 tokens on two ranks: each computes the prompt and half of the responses."""
    shares = plan(groups((10, [41] * 8)), 2, 1000, share_prompts=True)
    assert [[len(index) for index in share] for share in shares] == [[4], [4]]
    # with a long prompt and short responses it would cost more than it saves
    shares = plan(groups((1000, [2] * 2)), 2, 2000, share_prompts=True)
    assert sorted(len(index) for share in shares for index in share) in ([0, 2], [1, 1])


def test_the_busiest_rank_has_little_more_than_its_part():
    whole = groups(*[(30, [20 + 3 * i] * 8) for i in range(7)])
    shares, cost = plan(whole, 4, 600, share_prompts=True), Costs(whole, share_prompts=True)
    loads = [sum(cost(index.tolist()) for index in share) for share in shares]
    assert max(loads) <= 1.15 * cost(list(range(len(whole)))) / 4


def test_members_that_are_given_stay_with_their_rank():
    whole = groups((10, [6] * 4), (10, [6] * 4))
    members = [torch.tensor([0, 1, 4]), torch.tensor([2, 3, 5, 6, 7])]
    cut = plan_within(whole, members, 25, share_prompts=True)
    assert len(cut[0]) == len(cut[1])
    for mine, parts in zip(members, cut, strict=True):
        assert sorted(torch.cat(parts).tolist()) == mine.tolist()
