"""PIPO: its feedback by hand, what it updates and when, and saving and loading its state."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from megatron_rft.objectives.base import Prepared, State, Update, counts
from megatron_rft.objectives.grpo import GRPO
from megatron_rft.objectives.plugins.pipo import improvement
from megatron_rft.objectives.ppo import PPO
from megatron_rft.objectives.sdpo import SDPO
from megatron_rft.records import Batch
from megatron_rft.training.models import same
from tests.made import dynamic, made, pipo

LENS, GROUPS = [2, 1, 3, 1], [0, 0, 1, 1]


BASES = [
    made("grpo", mini_batches=2),
    made("gspo", mini_batches=2),
    made("dapo", mini_batches=2),
    made("ppo", mini_batches=2),
    made("sdpo", mini_batches=2),
]
UNUSED_BY = {SDPO: ("tokens.old_logprobs",)}  # only PIPO asks for them


def window(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    "mu, xi",
    [(0.5, 2.0), (0.3, 0.0), (0.25, -0.5), (0.9, 5.0), (-0.9, -5.0), (math.nan, 0.0), (math.inf, 0.0)],
)
def test_feedback_by_hand(mu, xi):
    """Window (0.2, 0.3, 0.4): mean 0.3 and std 0.1 with K - 1; the bound is 5."""
    assert improvement(mu, window(0.2, 0.3, 0.4), 5.0) == pytest.approx(xi, abs=1e-12)


@pytest.mark.parametrize(
    "values", [(0.3, 0.3, 0.3), (0.1,) * 7, (0.5,), (0.2, math.nan, 0.4), (0.2, math.inf, 0.4), (0.0, 1e-200)]
)
def test_no_feedback_without_a_finite_spread(values):
    assert improvement(0.7, window(*values), 10.0) == 0.0


@pytest.mark.parametrize(
    "mu, values",
    [
        (0.15, (0.2, 0.1)),  # the mean of the floats is 0.15000000000000002
        (sum([0.1] * 3 + [0.7]) / 4, ((0.7 + 0.1 + 0.1 + 0.1) / 4, 0.25, 0.25)),
        (0.9, (0.25, 0.25 + 1e-16, 0.25)),
        (1e6 + 1e-9, (1e6 + 1.0, 1e6 - 1.0)),
    ],
)
def test_rounding_is_no_improvement(mu, values):
    assert improvement(mu, window(*values), 10.0) == 0.0


@given(st.permutations([0.1, 0.2, 0.3, 0.7, 0.55, 1 / 3]), st.floats(0, 1))
def test_feedback_does_not_depend_on_the_order_of_a_sum(values, mu):
    assert improvement(mu, window(*values), 10.0) == improvement(mu, window(*sorted(values)), 10.0)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=10), st.floats(0, 1))
def test_feedback_is_finite_bounded_and_has_the_sign_of_the_change(values, mu):
    xi = improvement(mu, window(*values), 10.0)
    assert -10 <= xi <= 10
    if abs(mu - sum(values) / len(values)) > 1e-9 and max(values) - min(values) > 1e-9:
        assert (xi > 0) == (mu > sum(values) / len(values))


def sampled(make_batch, mu: float, seed: int = 0, rewards: tuple = (1.0, 0.0, 1.0, 0.0)) -> Batch:
    """A batch whose sampled mean is `mu`, for any part of it that is trained on."""
    random = torch.Generator().manual_seed(seed)
    names = ("old_logprobs", "ref_logprobs", "values", "teacher_logprobs")
    tokens = {name: torch.rand(sum(LENS), generator=random) - 1.5 for name in names}
    tokens["rollout_logprobs"] = tokens["old_logprobs"]
    batch = make_batch(LENS, GROUPS, list(rewards), **tokens).with_contexts([[7], [], [8, 9], [7]])
    return batch.with_scalars(sampled_reward_sum=mu * 8, sampled_count=8.0)


def run(objective, batches: list[Batch], state: State | None = None) -> list[Prepared]:
    steps = []
    state = objective.init() if state is None else state
    for batch in batches:
        steps.append(objective.prepare(batch, state))
        state = steps[-1].state
    return steps


def test_verification_begins_when_the_window_is_full(make_batch):
    """K = 3: three steps fill it, the fourth compares 0.5 with (0.2, 0.3, 0.4), the fifth 0.3 with (0.3, 0.4, 0.5)."""
    batches = [sampled(make_batch, mu, seed) for seed, mu in enumerate((0.2, 0.3, 0.4, 0.5, 0.3))]
    steps = run(pipo(made("grpo"), window=3, learning_rate=3e-6), batches)
    assert [[update.name for update in step.updates] for step in steps] == [["policy"]] * 3 + [
        ["verification", "policy"]
    ] * 2
    assert [step.metrics["pipo/mu"] for step in steps] == pytest.approx([0.2, 0.3, 0.4, 0.5, 0.3])
    assert all("pipo/xi" not in step.metrics for step in steps[:3])
    found = [
        {k.removeprefix("pipo/"): v for k, v in step.metrics.items() if k.startswith("pipo/")} for step in steps[3:]
    ]
    assert found[0] == pytest.approx(
        dict(mu=0.5, anchor_mean=0.3, anchor_std=0.1, xi=2.0, phi=2.0, reinforced=1, suppressed=0, skipped=0)
    )
    assert found[1] == pytest.approx(
        dict(mu=0.3, anchor_mean=0.4, anchor_std=0.1, xi=-1.0, phi=-0.1, reinforced=0, suppressed=1, skipped=0)
    )


def test_verification_is_one_step_on_the_previous_batch(make_batch):
    """Rewards (1, 0) in both groups: attributions +1 and -1 on every token, times phi = 2."""
    batches = [sampled(make_batch, mu, seed) for seed, mu in enumerate((0.2, 0.3, 0.4, 0.5))]
    base = made("grpo", mini_batches=2, epochs=3)
    verification, policy = run(pipo(base, window=3, learning_rate=3e-6), batches)[3].updates
    (mini_batch,) = verification.steps()
    assert mini_batch.response_ids.tolist() == batches[2].response_ids.tolist()
    assert mini_batch.tokens["advantages"].tolist() == [1.0, 1.0, -1.0, 1.0, 1.0, 1.0, -1.0]
    assert verification.scale == pytest.approx(2.0)
    assert torch.equal(mini_batch.tokens["old_logprobs"], batches[2].tokens["old_logprobs"])
    assert verification.learning_rate == 3e-6 and policy.learning_rate is None
    assert torch.equal(policy.batch.tokens["old_logprobs"], batches[3].tokens["old_logprobs"])
    assert len(list(policy.steps())) == 6


@pytest.mark.parametrize(
    "how, weights", [("none", [1, 1, 1, 1]), ("truncated", [2, 1, 1, 2]), ("masked", [0, 1, 1, 0])]
)
def test_the_verification_has_the_bases_importance_weights(make_batch, how, weights):
    """Weights e, 1, 1, e^2 of tokens with attributions 1, 1, -1, -1; the cap is 2. Without a clip the gradient is phi
    times that of the base's own loss: (1 / 2) (1 / 2) w a per token."""
    names = {"old_logprobs": [-1.0] * 4, "rollout_logprobs": [-2.0, -1, -1, -3]}
    batch = make_batch([2, 2], [0, 0], [1, 0], **names)
    batches = [batch.with_scalars(sampled_reward_sum=mu * 2, sampled_count=2.0) for mu in (0.2, 0.3, 0.4)]
    base = made("grpo", kl_coefficient=0.0, importance=how)
    outer = pipo(dynamic(base), window=2, xi_max=2)
    gradients = []
    for update in run(outer, batches)[2].updates:
        (mini_batch,) = update.steps()
        outputs = {name: torch.full((4,), -1.0, requires_grad=True) for name in ("logprobs", "entropy")}
        update.loss(outputs, mini_batch).mean(counts(mini_batch)).backward()
        gradients.append((-4 * update.scale * outputs["logprobs"].grad).tolist())
    wanted = [w * a for w, a in zip(weights, (1, 1, -1, -1), strict=True)]
    assert gradients[0] == pytest.approx([2 * each for each in wanted]) and gradients[1] == pytest.approx(wanted)


def test_responses_without_an_attribution_have_no_gradient(make_batch):
    """The second group's rewards are equal. With a KL in its loss the base computes all responses itself."""
    batches = [sampled(make_batch, mu, seed) for seed, mu in enumerate((0.2, 0.3, 0.4, 0.5))]
    rewards = torch.where(batches[2].groups == batches[2].groups[0], batches[2].sequences["rewards"], 1.0)
    batches[2] = batches[2].with_sequences(rewards=rewards)
    base = made("grpo", mini_batches=2, epochs=3)
    verification, policy = run(pipo(base, window=3), batches)[3].updates
    assert verification.batch.sequences["no_gradient"].tolist() == [False, False, True, True]
    assert "no_gradient" not in policy.batch.sequences


def test_sampling_ahead_verifies_the_update_that_all_of_the_batch_has_seen(make_batch):
    """Step, oldest version of its batch: first one-step-off, then batches of mixed versions. B_v made version v."""
    oldest = {1: 0, 2: 0, 3: 1, 4: 2, 5: 2, 6: 4, 7: 6}
    batches = {
        step: sampled(make_batch, mu=0.1 * step**2, seed=step).with_scalars(step=float(step), oldest_version=float(v))
        for step, v in oldest.items()
    }
    objective = pipo(made("grpo"), window=2, staleness=2)
    steps = run(objective, list(batches.values()))
    found = {}
    for number, prepared in enumerate(steps, 1):
        update = prepared.updates[0]
        found[number] = update.name == "verification" and int(update.batch.scalars["step"])
        foreseen = objective.foreseen(steps[number - 2].state) if number > 1 else None
        known = foreseen is not None and same(foreseen.batch, update.batch)
        assert known == (found[number] == number - 1 > 0)  # the newest batch, and xi > 0 here
        if found[number]:
            assert torch.equal(update.batch.response_ids, batches[found[number]].response_ids)
            assert torch.equal(update.batch.tokens["old_logprobs"], batches[found[number]].tokens["old_logprobs"])
    assert found == {1: False, 2: False, 3: 1, 4: 2, 5: 2, 6: 4, 7: 6}
    kept = {name.split(".")[1] for name in steps[-1].state if name.startswith("previous.")}
    assert len(kept) == 3  # staleness + 1

    never = run(
        pipo(made("grpo"), window=2, staleness=1), [b.with_scalars(oldest_version=0.0) for b in batches.values()]
    )
    assert all(step.updates[0].name == "policy" for step in never)
    assert [step.metrics.get("pipo/skipped") for step in never] == [None, None, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("base", BASES, ids=lambda base: type(base).__name__)
@pytest.mark.parametrize("mu, known", [(0.5, True), (0.1, False), (0.3, None)])
def test_after_a_rise_the_gradient_is_the_foreseen_one(make_batch, base, mu, known):
    """The window is (0.2, 0.3, 0.4). For phi > 0 the state gives the gradient up to its scale. A fall has another
    gradient: the clip bounds the other side. Without a change there is no gradient."""
    objective = pipo(base, window=3)
    before = run(objective, [sampled(make_batch, value, seed) for seed, value in enumerate((0.2, 0.3, 0.4))])
    assert objective.foreseen(before[1].state) is None  # the window is not full
    foreseen = objective.foreseen(before[2].state)
    update = objective.prepare(sampled(make_batch, mu, 3), before[2].state).updates[0]
    assert (update.name == "verification") == (known is not None) and same(foreseen.batch, update.batch) == bool(known)
    if known is not None:
        assert torch.equal(gradient(foreseen), gradient(replace(update, scale=1.0))) == known
        assert foreseen.mini_batches * foreseen.epochs == 1


def test_nothing_is_foreseen_without_an_attribution(make_batch):
    batches = [sampled(make_batch, value, rewards=(1.0, 1.0, 0.0, 0.0)) for value in (0.2, 0.3)]
    objective = pipo(made("grpo"), window=2)
    assert objective.foreseen(run(objective, batches)[-1].state) is None


def gradient(update: Update) -> torch.Tensor:
    """The gradient of the first step with respect to the log-probs, at the sampling policy; or with respect to the
    values or the divergence, if the loss has those."""
    batch = next(update.steps(), None)
    if batch is None:
        return torch.zeros(0)
    sampling = batch.tokens.get("old_logprobs", batch.tokens.get("rollout_logprobs"))
    names = ("logprobs", "entropy", "values", "reverse_kl", "other_logprobs")
    outputs = {name: sampling.clone().requires_grad_() for name in names}
    loss = update.loss(outputs, batch).mean(counts(batch))
    leaves = [outputs[name] for name in ("logprobs", "values", "reverse_kl")]
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return update.scale * next(each for each in found if each is not None)


@pytest.mark.parametrize("mu, phi", [(0.5, 2.0), (0.2, -0.1), (0.35, 0.5)])
def test_a_rise_repeats_the_last_gradient_and_a_fall_takes_a_tenth_of_it_back(make_batch, mu, phi):
    """Two groups of two have A = +-1, so attributions equal advantages and J_PI's gradient is phi J_GRPO's."""
    batches = [sampled(make_batch, value, seed) for seed, value in enumerate((0.2, 0.3, 0.4, mu))]
    steps = run(pipo(made("grpo", kl_coefficient=0.0), window=3), batches)
    (before,) = steps[2].updates
    torch.testing.assert_close(gradient(steps[3].updates[0]), phi * gradient(before))


def test_the_normalised_attributions_are_scaled(make_batch):
    """Rewards (1, 0, 0, 0): A = (3, -1, -1, -1) / sqrt(3), attributions (2, -2/3, -2/3, -2/3); phi = 2 doubles them."""
    given = dict.fromkeys(("old_logprobs", "ref_logprobs", "rollout_logprobs"), [-1.0] * 5)
    sample = make_batch([1, 2, 1, 1], [0] * 4, [1.0, 0.0, 0.0, 0.0], **given)
    batches = [sample.with_scalars(sampled_reward_sum=mu, sampled_count=1.0) for mu in (0.2, 0.3, 0.4, 0.5)]
    verification, _ = run(pipo(made("grpo"), window=3), batches)[3].updates
    advantages = verification.scale * verification.batch.tokens["advantages"]
    torch.testing.assert_close(advantages, torch.tensor([4.0, -4 / 3, -4 / 3, -4 / 3, -4 / 3]))


def test_mu_is_that_of_everything_sampled(make_batch):
    """Two groups were filtered out before: the mean is that of all eight."""
    batch = sampled(make_batch, 0.625).select(torch.tensor([0, 1]))
    assert run(pipo(made("grpo")), [batch])[0].metrics["pipo/mu"] == 0.625


def assert_same_updates(left: list[Update], right: list[Update], but: tuple[str, ...] = ()) -> None:
    """Asserts bitwise equality; `but` are values that may be in the batch or not."""
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        facts = [
            (u.name, u.model, u.outputs, u.mini_batches, u.epochs, u.learning_rate, u.moments, u.scale)
            for u in (one, other)
        ]
        assert facts[0] == facts[1]
        states = [u.batch.state_dict() for u in (one, other)]
        states = [{k: v for k, v in state.items() if k not in but} for state in states]
        assert states[0].keys() == states[1].keys()
        for name in states[0]:
            torch.testing.assert_close(states[0][name], states[1][name], rtol=0, atol=0, equal_nan=True)
        assert torch.equal(gradient(one), gradient(other))


@pytest.mark.parametrize(
    "name, means, rectification, rewards",
    [
        ("std zero", [0.3] * 4 + [0.7], 0.1, (1.0, 0.0, 1.0, 0.0)),
        ("xi zero", [0.25, 0.5, 0.75, 0.5], 0.1, (1.0, 0.0, 1.0, 0.0)),
        ("lambda zero and a fall", [0.2, 0.3, 0.4, 0.1], 0.0, (1.0, 0.0, 1.0, 0.0)),
        ("no attribution", [0.2, 0.3, 0.4, 0.9], 0.1, (1.0, 1.0, 0.0, 0.0)),
        ("a mean that is not finite", [0.2, math.nan, 0.4, 0.9], 0.1, (1.0, 0.0, 1.0, 0.0)),
    ],
)
@pytest.mark.parametrize("base", BASES, ids=lambda base: type(base).__name__)
def test_without_feedback_the_base_is_untouched(make_batch, base, name, means, rectification, rewards):
    """Property 3. The first three means fill the window; later steps have phi = 0 or zero attributions."""
    batches = [sampled(make_batch, mu, seed, rewards) for seed, mu in enumerate(means)]
    if name == "no attribution":
        batches = [batch.with_contexts([[]] * 4) for batch in batches]  # nor any from a teacher
        if isinstance(base, PPO):
            pytest.skip("its advantages come from the critic as well")
    closed = run(pipo(base, window=3, rectification=rectification), batches)
    for with_pipo, without in zip(closed, run(base, batches), strict=True):
        assert_same_updates(with_pipo.updates, without.updates, UNUSED_BY.get(type(base), ()))
    assert [step.metrics.get("pipo/skipped") for step in closed] == [None] * 3 + [1.0] * (len(means) - 3)


@pytest.mark.parametrize("mini_batches", [1, 2])
@pytest.mark.parametrize(
    "name, options", [("grpo", {}), ("gspo", {}), ("dapo", {}), ("ppo", {}), ("sdpo", {"importance_cap": 2.0})]
)
def test_a_base_that_trains_on_the_engines_log_probs_keeps_its_ratio(make_batch, name, options, mini_batches):
    """old_logprobs rollout: the engine's log-probs are the ratio's denominator, also in an on-policy step."""
    base = made(name, mini_batches=mini_batches, old_logprobs="rollout", **options)
    batches = [sampled(make_batch, mu, seed) for seed, mu in enumerate((0.2, 0.3, 0.4))]
    closed = run(pipo(base, window=100, old_logprobs="rollout"), batches)
    for with_pipo, without in zip(closed, run(base, batches), strict=True):
        assert_same_updates(with_pipo.updates, without.updates)
        assert torch.equal(
            with_pipo.updates[0].batch.tokens["old_logprobs"], without.updates[0].batch.tokens["old_logprobs"]
        )


@settings(max_examples=60)
@given(
    st.sampled_from(BASES), st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=8), st.integers(2, 4)
)
def test_the_base_part_never_depends_on_pipo(make_batch, base, means, size):
    """For any feedback the base's updates are those it makes alone, after the verification update."""
    batches = [sampled(make_batch, mu, seed) for seed, mu in enumerate(means)]
    closed = run(pipo(base, window=size), batches)
    for with_pipo, without in zip(closed, run(base, batches), strict=True):
        verification, own = with_pipo.updates[: -len(without.updates)], with_pipo.updates[-len(without.updates) :]
        assert [update.name for update in verification] in ([], ["verification"])
        assert_same_updates(own, without.updates, UNUSED_BY.get(type(base), ()))


def test_an_on_policy_base_stays_on_policy_until_a_verification_step_was_made(make_batch):
    """Until then its own log-probs are the old ones to the last bit."""
    batches = [sampled(make_batch, mu, seed) for seed, mu in enumerate((0.2, 0.3, 0.4, 0.5))]
    steps = run(pipo(made("grpo"), window=3), batches)
    assert pipo(made("grpo")).needs == {"old_logprobs", "ref_logprobs"}
    alone = run(made("grpo"), [batch.without_tokens("old_logprobs") for batch in batches])
    for with_pipo, without in zip(steps[:3], alone, strict=False):
        assert_same_updates(with_pipo.updates, without.updates)
    assert torch.equal(steps[3].updates[1].batch.tokens["old_logprobs"], batches[3].tokens["old_logprobs"])


@pytest.mark.parametrize("base", BASES, ids=lambda base: type(base).__name__)
def test_killed_and_resumed_from_a_file_it_goes_on_bit_identically(make_batch, base, tmp_path):
    """The state is written and read between all steps, also the empty one."""
    batches = [sampled(make_batch, mu, seed) for seed, mu in enumerate((0.2, 0.3, 0.4, 0.5, 0.1, 0.7))]
    objective = pipo(base, window=3)
    whole = run(objective, batches)
    for stop in range(len(batches)):
        state = whole[stop - 1].state if stop else objective.init()
        save_file(state, tmp_path / "state.safetensors")
        for resumed, uninterrupted in zip(
            run(objective, batches[stop:], load_file(tmp_path / "state.safetensors")), whole[stop:], strict=True
        ):
            assert_same_updates(resumed.updates, uninterrupted.updates)
            assert resumed.metrics == uninterrupted.metrics


def test_the_memory_does_not_grow(make_batch):
    steps = run(pipo(made("grpo"), window=3), [sampled(make_batch, 0.1 * i, i) for i in range(6)])
    assert steps[-1].state["mu"].tolist() == pytest.approx([0.3, 0.4, 0.5])
    sizes = [sum(value.numel() for value in step.state.values()) for step in steps]
    assert sizes[2] == sizes[-1]


class Counting(GRPO):
    """A base with its own state: the number of its steps."""

    def init(self) -> State:
        return {"steps": torch.zeros(1)}

    def prepare(self, batch: Batch, state: State) -> Prepared:
        return Prepared(super().prepare(batch, {}).updates, {"steps": state["steps"] + 1}, {"mine": 1.0})


def test_the_base_keeps_its_own_state_and_metrics(make_batch):
    last = run(pipo(Counting(made("grpo").options), window=2), [sampled(make_batch, 0.1 * i) for i in range(4)])[-1]
    assert last.state["base.steps"].item() == 4 and last.metrics["mine"] == 1.0
