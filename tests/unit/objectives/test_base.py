"""Losses as sums, and updates split into optimizer steps."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rft.config.algorithms import online as section
from megatron_rft.objectives.base import Update, counts, sequence_means, sequence_sums, with_gradient, zero_sequences
from megatron_rft.objectives.grpo import GRPO
from tests.made import distilled, dynamic, made, pipo


def test_counts_by_hand(make_batch):
    """Three sequences, one of them masked out whole: 3 trained tokens, 2 trained sequences, 3 units."""
    batch = make_batch([2, 2, 1], [0, 0, 1], [0, 0, 0], response_mask=[1, 1, 0, 0, 1])
    assert counts(batch) == {"response_tokens": 3.0, "sequences": 2.0, "groups": 2.0, "units": 3.0}
    paired = batch.with_sequences(unit=torch.tensor([4, 4, 9]))
    assert counts(paired)["units"] == 2.0


def test_counts_of_nothing_do_not_divide_by_zero(make_batch):
    assert set(counts(make_batch([], [], [])).values()) == {1.0}
    assert counts(make_batch([2], [0], [0], response_mask=[0, 0]))["response_tokens"] == 1.0


def test_sequence_sums_and_means(make_batch):
    batch = make_batch([3, 1, 0], [0, 0, 0], [0, 0, 0], response_mask=[1, 0, 1, 1])
    values = torch.tensor([1.0, 50.0, 3.0, 10.0])
    assert sequence_sums(values, batch).tolist() == [4.0, 10.0, 0.0]
    assert sequence_means(values, batch).tolist() == [2.0, 10.0, 0.0]


def test_zero_sequences_by_hand(make_batch):
    """The third value is masked out; the fourth sequence has no value that is not zero; the fifth's add up to zero."""
    batch = make_batch([2, 1, 1, 0, 2], [0] * 5, [0] * 5, response_mask=[1, 1, 0, 1, 1, 1])
    zero = zero_sequences(torch.tensor([0.0, -1e-9, 5.0, 0.0, 1.0, -1.0]), batch)
    assert zero.tolist() == [False, True, True, True, False]


def test_with_gradient_leaves_marked_sequences_out_unless_nothing_is_left(make_batch):
    batch = make_batch([2, 1, 1], [0, 0, 0], [0] * 3)
    marked = batch.with_sequences(no_gradient=torch.tensor([False, True, False]))
    assert with_gradient(batch) is batch and with_gradient(marked).response_lens.tolist() == [2, 1]
    assert len(with_gradient(batch.with_sequences(no_gradient=torch.ones(3, dtype=torch.bool)))) == 3


@pytest.mark.parametrize(
    "options, marked",
    [
        (dict(kl_coefficient=0.0), [False, False, True, True]),
        (dict(kl_coefficient=0.1, kl_in="reward"), [False] * 4),  # the penalties differ
        (dict(kl_coefficient=0.1), None),
        (dict(kl_coefficient=0.0, entropy_coefficient=0.1), None),
    ],
)
def test_responses_of_a_group_with_equal_rewards_have_no_gradient(make_batch, options, marked):
    named = {name: [-1.0, -1.1, -1.2, -1.3] for name in ("old_logprobs", "ref_logprobs")}
    batch = make_batch([1] * 4, [0, 0, 1, 1], [0, 1, 1, 1], **named | {"ref_logprobs": [-1.0, -1.2, -1.0, -1.5]})
    (update,) = made("grpo", **options).prepare(batch, {}).updates
    found = update.batch.sequences.get("no_gradient")
    assert found is marked or found.tolist() == marked


@pytest.mark.parametrize(
    "objective, steps",
    [
        (made("dapo", kl_coefficient=0.0, mini_batches=2), 0),
        (made("dapo", kl_coefficient=0.1, mini_batches=2), 2),
        (made("dapo", kl_coefficient=0.0, entropy_coefficient=0.1), 1),
        (made("dapo", kl_coefficient=0.0, filter_groups=False), 1),
        (made("grpo", kl_coefficient=0.0), 1),
        (distilled(made("dapo", kl_coefficient=0.0)), 1),
        (dynamic(made("dapo", kl_coefficient=0.0), agreeing=True), 1),
        (pipo(made("dapo", kl_coefficient=0.0)), 0),
    ],
)
def test_no_step_without_a_kept_group_and_another_term(make_batch, objective, steps):
    """Two groups of equal rewards; a refiner improved one response. Momentum alone would move the weights."""
    named = dict.fromkeys(("old_logprobs", "ref_logprobs"), [-1.0] * 4)
    batch = make_batch([1] * 4, [0, 0, 1, 1], [0, 0, 1, 1], **named).with_refined([[7], [], [], []])
    batch = batch.with_scalars(sampled_reward_sum=2.0, sampled_count=4.0)
    assert [len(list(update.steps())) for update in objective.prepare(batch, objective.init()).updates] == [steps]


def test_a_loss_of_its_own_marks_nothing(make_batch):
    class OwnLoss(GRPO):
        def loss(self, outputs, batch):
            return super().loss(outputs, batch)

    batch = make_batch([1] * 2, [0, 0], [1, 1])
    (update,) = OwnLoss(section.GRPO(kl_coefficient=0.0)).prepare(batch, {}).updates
    assert "no_gradient" not in update.batch.sequences


def test_metrics_are_means_over_the_computed_sequences(make_batch):
    """Two of four responses are computed: the surrogate is divided by four, the entropy by two."""
    batch = make_batch([1] * 4, [0, 0, 1, 1], [0, 1, 1, 1], rollout_logprobs=[-1.0] * 4)
    (update,) = made("grpo", kl_coefficient=0.0).prepare(batch, {}).updates
    computed, number = update.computed(update.batch, skip=True)
    loss = update.loss({"logprobs": torch.tensor([-2.0, -1.0]), "entropy": torch.tensor([3.0, 1.0])}, computed)
    found = loss.logged(number)
    assert found["entropy"] == 2.0 and found["ratio_mean"] == 1.0 and found["surrogate"] == 0.0
    assert loss.logged(counts(update.batch))["entropy"] == 1.0


def groups_of(update: Update) -> list[list[int]]:
    return [part.sequences["group"].tolist() for part in update.steps()]


def test_steps_keep_groups_together(make_batch):
    batch = make_batch([1] * 6, [7, 3, 7, 3, 5, 5], [0] * 6)
    update = Update("policy", batch, loss=None, mini_batches=2, epochs=2)
    assert groups_of(update) == [[3, 3, 5, 5], [7, 7]] * 2


@pytest.mark.parametrize("groups, mini_batches, sizes", [(5, 4, [2, 1, 1, 1]), (2, 4, [1, 1]), (4, 1, [4]), (0, 3, [])])
def test_as_many_steps_as_asked_for_and_none_empty(make_batch, groups, mini_batches, sizes):
    batch = make_batch([1] * groups, list(range(groups)), [0.0] * groups)
    assert [len(part) for part in groups_of(Update("policy", batch, None, mini_batches=mini_batches))] == sizes


objectives = st.sampled_from(
    [
        made("grpo"),
        made("grpo", aggregation="token_mean", kl_coefficient=0.5, kl_estimator="k2", entropy_coefficient=0.01),
        made("grpo", kl_coefficient=0.0, clip_low=0.05, clip_high=0.1),
        made("sft"),
    ]
)


@settings(max_examples=60)
@given(objectives, st.lists(st.integers(1, 5), min_size=2, max_size=9), st.data())
def test_gradient_does_not_depend_on_the_cut(make_batch, objective, lens, data):
    """Property 5 for the loss: micro-batches of any sizes, in any order, add up to the whole mini-batch."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    size, number = sum(lens), len(lens)
    random = {name: torch.rand(size, generator=generator) - 1 for name in ("old_logprobs", "ref_logprobs")}
    mask = torch.tensor(data.draw(st.lists(st.sampled_from([0.0, 1.0, 1.0]), min_size=size, max_size=size)))
    rewards = torch.randint(0, 2, (number,), generator=generator).tolist()
    batch = make_batch(lens, [i % 3 for i in range(number)], rewards, response_mask=mask, **random)
    (update,) = objective.prepare(batch, objective.init()).updates
    batch = update.batch.with_tokens(place=torch.arange(size))
    owner = torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=number, max_size=number)))

    def gradient(parts: list[torch.Tensor]) -> torch.Tensor:
        leaves = {
            name: torch.rand(size, generator=torch.Generator().manual_seed(7)) - 1 for name in ("logprobs", "entropy")
        }
        leaves = {name: leaf.double().requires_grad_() for name, leaf in leaves.items()}
        for index in parts:
            micro = batch.select(index)
            outputs = {name: leaf[micro.tokens["place"]] for name, leaf in leaves.items()}
            update.loss(outputs, micro).mean(counts(batch)).backward()
        return torch.cat([leaf.grad if leaf.grad is not None else torch.zeros(size) for leaf in leaves.values()])

    whole = gradient([torch.arange(number)])
    cut = gradient([(owner == part).nonzero().flatten() for part in range(4)])
    torch.testing.assert_close(cut, whole, rtol=1e-6, atol=1e-9)
    assert (whole.view(2, size)[:, mask == 0] == 0).all()
