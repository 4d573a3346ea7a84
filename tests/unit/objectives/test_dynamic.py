"""The dynamic constraint: Eq. 6 against numpy, its gradient, where it acts, and where it changes nothing."""

import math

import numpy as np
import pytest
import torch

from megatron_rft.objectives.base import counts, with_gradient
from megatron_rft.objectives.plugins.dynamic import constrained_lens, joined, on_response_tokens, pairs
from megatron_rft.records import Batch
from tests.made import dynamic, made, pipo

LENS, GROUPS, REWARDS = [3, 2, 4, 1, 2, 3], [0, 0, 0, 1, 1, 1], [0.0, 1.0, 0.0, -1.0, 0.0, 1.0]
# shorter than a, none, longer, equal in length, a itself, none
REFINED = [[70, 71], [], [72, 73, 74, 75, 76, 77], [78], [40, 41], []]
BASES = [
    made("grpo", mini_batches=2),
    made("grpo", kl_in="reward"),
    made("gspo", mini_batches=2),
    made("dapo", mini_batches=2),
    made("cispo", mini_batches=2),
    made("rloo"),
    made("reinforce_plus_plus"),
    made("ppo", mini_batches=2, epochs=2),
]


@pytest.fixture
def batch(make_batch) -> Batch:
    random = torch.Generator().manual_seed(0)
    names = ("old_logprobs", "ref_logprobs", "values", "refined_logprobs")
    tokens = {name: torch.rand(sum(LENS), generator=random) - 1.5 for name in names}
    tokens["rollout_logprobs"] = tokens["old_logprobs"]
    return make_batch(LENS, GROUPS, REWARDS, **tokens).with_refined(REFINED)


def outputs(batch: Batch) -> dict[str, torch.Tensor]:
    values = -torch.rand(len(batch.response_ids), generator=torch.Generator().manual_seed(1))
    return {name: values.clone().requires_grad_() for name in ("logprobs", "entropy", "values", "reverse_kl")}


def policy(objective, batch: Batch):
    return next(u for u in objective.prepare(batch, objective.init()).updates if u.model == "actor")


def by_numpy(logprobs: np.ndarray, batch: Batch, how: str) -> np.ndarray:
    """D of each pair, from the rows of a joined batch, in float64."""
    rows = np.split(logprobs.astype(np.float64), np.cumsum(batch.response_lens.numpy())[:-1])
    refined = [row for row, is_pair in zip(rows, batch.sequences["refined"].tolist(), strict=True) if is_pair]
    lens = [(len(r), n) for r, n in zip(REFINED, LENS, strict=True) if r]
    found = []
    for row, (theirs, ours) in zip(refined, lens, strict=True):
        terms = [-row[t] for t in range(min(theirs, ours))]
        found.append(sum(terms) if how == "sum" else sum(terms) / len(terms))
    return np.array(found)


@pytest.mark.parametrize("how", ["sum", "mean"])
def test_d_is_eq_6(batch, how):
    update = policy(dynamic(made("grpo"), eta=0.25, tokens=how, per="pairs"), batch)
    (mini_batch,) = update.steps()
    out = outputs(mini_batch)
    counted = update.counts(mini_batch)
    loss = update.loss(out, mini_batch)
    weight, term = loss.terms["constraint"]
    expected = by_numpy(out["logprobs"].detach().numpy(), mini_batch, how)
    assert weight == 0.25 and counted["constrained"] == 4
    assert term.total.item() == pytest.approx(expected.sum(), rel=1e-6)
    base = made("grpo").prepare(batch, {}).updates[0]
    (plain,) = base.steps()
    own = {name: value.detach()[: len(plain.response_ids)] for name, value in out.items()}
    whole = base.loss(own, plain).mean(base.counts(plain)).item() + 0.25 * expected.mean()
    assert loss.mean(counted).item() == pytest.approx(whole, rel=1e-5)
    metric = loss.metrics["constraint/cross_entropy"]
    all_terms = by_numpy(out["logprobs"].detach().numpy(), mini_batch, "sum").sum()
    assert metric.total.item() / counted[metric.per] == pytest.approx(all_terms / 9, rel=1e-5)


@pytest.mark.parametrize("mini_batches", [1, 2, 5])
def test_the_cross_entropy_of_a_step_is_that_of_all_refined_tokens(batch, mini_batches):
    """However many optimizer steps the two groups make: five mini-batches of two groups are two."""
    update = policy(dynamic(made("grpo", mini_batches=mini_batches), eta=0.25), batch)
    values = []
    for mini_batch in update.steps():
        out = {name: value.detach().fill_(-0.5) for name, value in outputs(mini_batch).items()}
        metric = update.loss(out, mini_batch).metrics["constraint/cross_entropy"]
        values.append(metric.total.item() / update.counts(mini_batch)[metric.per])
    assert sum(values) / len(values) == pytest.approx(0.5)


def test_lengths_shorter_longer_equal_and_the_same(batch):
    assert constrained_lens(batch).tolist() == [2, 0, 4, 1, 2, 0]
    found = pairs(batch)
    assert found.response_ids.tolist() == [70, 71, 72, 73, 74, 75, 78, 40, 41]
    assert found.response_lens.tolist() == [2, 4, 1, 2] and found.prompt_ids.tolist() == [1, 2] * 4
    assert found.groups.tolist() == [0, 0, 1, 1]
    aligned = on_response_tokens(torch.arange(1.0, 10.0), batch)
    assert aligned.tolist() == [1, 2, 0, 0, 0, 3, 4, 5, 6, 7, 8, 9, 0, 0, 0]


def test_the_gradient_goes_through_the_refined_tokens_alone(batch):
    """It is -eta/6 on each: six responses. Sampled tokens get the base's gradient, as without pairs."""
    update, base = policy(dynamic(made("dapo"), eta=0.6), batch), policy(made("dapo"), batch)
    (mini_batch,), (plain,) = update.steps(), base.steps()
    out = outputs(mini_batch)
    update.loss(out, mini_batch).mean(update.counts(mini_batch)).backward()
    sampled = len(plain.response_ids)
    assert out["logprobs"].grad[sampled:].tolist() == pytest.approx([-0.1] * 9)
    own = {name: value.detach()[:sampled].clone().requires_grad_() for name, value in out.items()}
    base.loss(own, plain).mean(base.counts(plain)).backward()
    assert torch.equal(own["logprobs"].grad, out["logprobs"].grad[:sampled])


def test_a_pair_has_a_gradient_where_its_group_has_none(batch):
    """The first group agrees; the pairs of both groups follow."""
    rewards = torch.where(batch.groups == 0, 0.0, batch.sequences["rewards"])
    update = policy(dynamic(made("grpo", kl_coefficient=0.0)), batch.with_sequences(rewards=rewards))
    (mini_batch,) = update.steps()
    sampled, refined = (mini_batch.select(mini_batch.sequences["refined"] == i) for i in (0, 1))
    assert sampled.sequences["no_gradient"][sampled.groups == 0].all()
    assert len(refined) == 4 and not refined.sequences["no_gradient"].any()


def test_pairs_alone_are_not_computed_without_sampled_responses(batch):
    """All rewards are equal. Means of metrics, such as the entropy, are over the sampled responses."""
    update = policy(dynamic(made("grpo", kl_coefficient=0.0)), batch.with_sequences(rewards=torch.zeros(6)))
    (mini_batch,) = update.steps()
    assert mini_batch.sequences["no_gradient"].sum() == 6 and len(with_gradient(mini_batch)) == 10


@pytest.mark.parametrize("pairs_left, responses, pairs_alone", [(4, 0.6 * 9 / 6, 0.6 * 9 / 4), (1, 0.6 / 6, 0.6)])
def test_the_constraint_fades_as_pairs_become_rare(batch, pairs_left, responses, pairs_alone):
    """Every refined token at -1: D is its number of terms. Four pairs of 2, 4, 1 and 2 terms, or the third alone."""
    if pairs_left == 1:
        batch = batch.with_refined([[], [], [], REFINED[3], [], []])
    for per, expected in (("responses", responses), ("pairs", pairs_alone)):
        update = policy(dynamic(made("grpo"), eta=0.6, per=per), batch)
        (mini_batch,) = update.steps()
        out = outputs(mini_batch) | {"logprobs": torch.full((len(mini_batch.response_ids),), -1.0)}
        weight, term = update.loss(out, mini_batch).terms["constraint"]
        assert weight * term.total.item() / update.counts(mini_batch)[term.per] == pytest.approx(expected)


def test_a_group_that_agrees_is_kept_for_its_pair(batch):
    """Two groups of three zeros; a refiner improved one response of the first."""
    agreeing = batch.with_sequences(rewards=torch.zeros(6)).with_refined([[70], [], [], [], [], []])
    for option, expected in ((False, [False] * 6), (True, [True] * 3 + [False] * 3)):
        objective = dynamic(made("dapo"), eta=0.1, agreeing=option)
        assert objective.keep(agreeing).tolist() == expected
        assert not objective.keep(agreeing.with_refined([[]] * 6)).any()


def test_a_group_that_agrees_is_trained_on_its_pairs_alone(batch):
    """Three zeros with a pair, and three unequal rewards. Neither overlong penalties nor shaping give credit to equal
    rewards; PIPO does not verify such credit either."""
    rewards, shaping = torch.tensor([0.0, 0, 0, 1, 0, 0]), torch.tensor([0.0, -0.5, -1, 0, 0, 0])
    shaped = batch.with_sequences(rewards=rewards, shaping=shaping).with_refined([[70], [], [], [], [], []])
    base = made("dapo", overlong_buffer=2, max_response_tokens=4)
    objective = dynamic(base, eta=0.1, agreeing=True)
    assert base._penalty(shaped).any() and objective.keep(shaped).all()
    first = shaped.groups[shaped.sequence_ids] == shaped.groups[0]
    for credit in (objective.advantages(shaped), objective.improvement_attributions(shaped)):
        assert not credit[first].any() and credit[~first].any()
    nothing_kept = shaped.with_sequences(rewards=torch.zeros(6))  # the last round of a step
    assert not base.advantages(nothing_kept).any()
    assert made("dapo", filter_groups=False).advantages(nothing_kept)[first].any()


@pytest.mark.parametrize("aggregation", ["group_mean", "token_mean", "sequence_mean"])
def test_a_group_that_agrees_does_not_dilute_the_base(batch, aggregation):
    """The base's loss, with its KL, is that of the second group alone, of 6 tokens. The pair's divisor is all six
    responses. PIPO verifies the second group alone."""
    given = batch.with_sequences(rewards=torch.tensor([0.0, 0, 0, 1, 0, 0])).with_refined([[70], [], [], [], [], []])
    base = made("dapo", aggregation=aggregation, kl_coefficient=0.1)
    objective = dynamic(base, eta=0.6, agreeing=True)
    assert objective.trained(given).tolist() == [False] * 3 + [True] * 3
    update, alone = policy(objective, given), policy(base, given.select(torch.arange(3, 6)))
    (mini_batch,), (plain,) = update.steps(), alone.steps()
    found = update.counts(mini_batch)
    assert [found[name] for name in ("response_tokens", "sequences", "groups", "constrained")] == [6, 3, 1, 6]
    out = outputs(mini_batch)
    update.loss(out, mini_batch).mean(found).backward()
    own = {name: value.detach()[9:15].clone().requires_grad_() for name, value in out.items()}
    alone.loss(own, plain).mean(counts(plain)).backward()
    gradient = out["logprobs"].grad
    assert gradient[:9].tolist() == [0] * 9 and gradient[15:].tolist() == pytest.approx([-0.1])
    torch.testing.assert_close(gradient[9:15], own["logprobs"].grad)


def test_refined_rows_spoil_nothing_however_unlikely(batch):
    """A log-prob of -200 with a reference's placeholder of 0 would be infinite in k3."""
    update = policy(dynamic(made("grpo", kl_coefficient=0.1), eta=1.0), batch)
    (mini_batch,) = update.steps()
    low = outputs(mini_batch)
    with torch.no_grad():
        low["logprobs"][mini_batch.tokens["refined_mask"] == 1] = -200.0
    loss = update.loss(low, mini_batch)
    assert math.isfinite(loss.mean(update.counts(mini_batch)).item())


def test_counts_and_groups_stay_the_bases(batch):
    """Two mini-batches by groups; each pair is in its group's mini-batch, and the base's denominators exclude it."""
    constrained, plain = (
        policy(dynamic(made("dapo", mini_batches=2)), batch),
        policy(made("dapo", mini_batches=2), batch),
    )
    for ours, theirs in zip(constrained.steps(), plain.steps(), strict=True):
        found = constrained.counts(ours)
        assert {name: found[name] for name in counts(theirs)} == counts(theirs)
        assert found["constrained"] == 3
        sampled = ours.select(ours.sequences["refined"] == 0)
        assert torch.equal(sampled.sequences["group_tokens"], theirs.sequences["group_tokens"])
        assert torch.equal(sampled.tokens["advantages"], theirs.tokens["advantages"])
        assert ours.groups.unique().tolist() == theirs.groups.unique().tolist()


@pytest.mark.parametrize("mode", ["loss", "reward"])
@pytest.mark.parametrize("base", BASES, ids=lambda base: type(base).__name__)
@pytest.mark.parametrize("why", ["eta 0", "no pair"])
def test_without_effect_the_updates_are_unchanged(batch, base, why, mode):
    """Property 4: the updates are the same."""
    objective = dynamic(base, eta=0.0) if why == "eta 0" else dynamic(base, eta=0.1, mode=mode)
    given = batch if why == "eta 0" else batch.with_refined([[]] * 6)
    ours, theirs = objective.prepare(given, objective.init()), base.prepare(given, base.init())
    measured = ours.metrics.keys() - theirs.metrics.keys()
    assert measured == ({"constraint/cross_entropy"} if why == "eta 0" else set()) and objective.init() == base.init()
    assert theirs.metrics.items() <= ours.metrics.items()
    assert len(ours.updates) == len(theirs.updates)
    for one, other in zip(ours.updates, theirs.updates, strict=True):
        assert (one.loss, one.counts, one.outputs, one.epochs) == (
            other.loss,
            other.counts,
            other.outputs,
            other.epochs,
        )
        a, b = one.batch.state_dict(), other.batch.state_dict()
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("base", BASES, ids=lambda base: type(base).__name__)
def test_in_the_reward_it_is_the_cross_entropy_without_a_gradient(batch, base):
    objective = dynamic(base, eta=0.5, mode="reward")
    assert objective.needs == base.needs | {"refined_logprobs"}
    refined = on_response_tokens(torch.linspace(-2, -1, 9), batch)
    batch = batch.with_tokens(refined_logprobs=refined)
    update = policy(objective, batch)
    assert "refined_mask" not in update.batch.tokens
    metrics = objective.prepare(batch, objective.init()).metrics
    assert metrics["constraint/cross_entropy"] == pytest.approx(1.5)  # nine terms from 2 down to 1
    assert metrics["reward/constraint_penalty"] == pytest.approx(0.5 * 9 * 1.5 / 6)
    penalised = batch.with_tokens(penalty=-0.5 * refined)
    assert torch.equal(update.batch.tokens["advantages"], base.advantages(penalised))
    assert not torch.equal(base.advantages(penalised), base.advantages(batch))


def test_in_the_reward_of_a_group_it_is_the_sum(batch):
    """Response 0 loses 0.5 (2 + 1), response 2 0.5 * 4, or the means: rewards (-1.5, 1, -2), or (-0.75, 1, -0.5)."""
    refined = on_response_tokens(torch.tensor([-2.0, -1, -1, -1, -1, -1, -1, -1, -1]), batch)
    batch = batch.with_tokens(refined_logprobs=refined)
    for how, first, third in (("sum", -1.5, -2.0), ("mean", -0.75, -0.5)):
        found = dynamic(made("grpo", kl_coefficient=0), 0.5, mode="reward", tokens=how)._penalised(batch)
        base = made("grpo", kl_coefficient=0)
        penalised = base.rewards(found) - base.penalties(found)
        assert penalised[:3].tolist() == pytest.approx([first, 1.0, third])
        assert found.sequences["rewards"].tolist() == REWARDS


def test_pipo_around_it_remembers_no_pair(batch):
    """State and verification step equal those of PIPO around the base alone."""
    base = made("dapo", mini_batches=2)
    ours, plain = (pipo(each, window=2) for each in (dynamic(base, 0.3), base))
    states = [ours.init(), plain.init()]
    for mu in (0.1, 0.2, 0.4):
        given = batch.with_scalars(sampled_reward_sum=mu, sampled_count=1.0)
        found = [objective.prepare(given, state) for objective, state in zip((ours, plain), states, strict=True)]
        states = [each.state for each in found]
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    verification, constrained = found[0].updates
    a, b = verification.batch.state_dict(), found[1].updates[0].batch.state_dict()
    assert all(torch.equal(a[name], b[name]) for name in b)
    assert "refined_mask" in constrained.batch.tokens and "refined_mask" not in verification.batch.tokens


def test_a_critics_update_has_no_pairs(batch):
    value, actor = dynamic(made("ppo"), 0.1).prepare(batch, made("ppo").init()).updates
    assert "refined_mask" not in value.batch.tokens and len(actor.batch) == 10
    warming = dynamic(made("ppo", critic={"warmup_steps": 1}), 0.1)
    assert [update.model for update in warming.prepare(batch, warming.init()).updates] == ["critic"]


def test_joined_rows(batch):
    found = joined(batch.with_tokens(advantages=torch.ones(15)))
    assert len(found) == 10 and found.sequences["refined"].tolist() == [0] * 6 + [1] * 4
    assert found.tokens["response_mask"].tolist() == [1.0] * 15 + [0.0] * 9
    assert found.tokens["refined_mask"].tolist() == [0.0] * 15 + [1.0] * 9
    assert found.tokens["advantages"][15:].eq(0).all() and found.refined_lens is None
