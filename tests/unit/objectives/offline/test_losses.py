"""Every offline loss against plain float64 loops written from the papers, values worked by hand, and closed forms."""

import math

import numpy as np
import pytest
import torch

from megatron_rft.objectives.offline.a_star_po import optimal_values
from megatron_rft.objectives.offline.base import counts, part_of
from megatron_rft.records import Batch
from tests.made import OFFLINE, made

LENS, GROUPS, REWARDS = [3, 1, 4, 2, 5, 2], [7, 7, 7, 7, 9, 9], [1.0, -1.0, 1.0, -1.0, -1.0, 1.0]
NAMES = ("logprobs", "ref_logprobs", "old_logprobs", "extrapolated_logprobs", "forward_kl")


def numbers():
    """[R] float64 per name: log-probs below zero, divergences above."""
    generator = np.random.default_rng(5)
    return {name: generator.uniform(0.05, 1.5, sum(LENS)) * (1 if name == "forward_kl" else -1) for name in NAMES}


def data():
    tokens = {name: torch.tensor(numbers()[name]) for name in ("ref_logprobs", "old_logprobs")}
    sequences = {"group": torch.tensor(GROUPS), "rewards": torch.tensor(REWARDS)}
    responses = [list(range(length)) for length in LENS]
    return Batch.of([[1]] * len(LENS), responses, tokens=tokens, sequences=sequences)


def drawn(objective, whole=None):
    """All examples of the data as one batch, as the trainer draws them."""
    whole = objective.annotate(data() if whole is None else whole)
    examples = objective.examples(whole)
    index = torch.tensor([position for example in examples for position in example])
    unit = torch.tensor([number for number, example in enumerate(examples) for _ in example])
    return whole.select(index).with_sequences(unit=unit), index


def evaluated(objective, batch=None, index=None, **outputs):
    """The loss, its logged metrics, and its gradient with respect to the log-probs of the drawn batch."""
    if batch is None:
        batch, index = drawn(objective)
    given = {name: torch.tensor(value) for name, value in numbers().items()} | outputs
    whole = data()
    named = whole.with_tokens(**{name: given[name] for name in NAMES}).select(index).tokens
    logprobs = named["logprobs"].requires_grad_()
    (update,) = objective.prepare(batch, objective.init()).updates
    assert update.outputs <= set(NAMES)
    found = {name: logprobs if name == "logprobs" else named[name] for name in update.outputs}
    loss, number = update.loss(found, update.batch), counts(update.batch)
    mean = loss.mean(number)
    (gradient,) = torch.autograd.grad(mean, logprobs)
    return mean.item(), {name: mean.item() for name, mean in loss.logged(number).items()}, gradient


# ---- independent loops


def segments(values):
    ends = np.cumsum(LENS)
    return [values[end - length : end] for end, length in zip(ends, LENS, strict=True)]


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def cover():
    """Pairs of the data above by hand: problem 7 has right 0, 2 and wrong 1, 3; problem 9 right 5, wrong 4."""
    return [(0, 1), (2, 3), (5, 4)]


def ratios():
    return [lp.sum() - ref.sum() for lp, ref in zip(*(segments(numbers()[n]) for n in NAMES[:2]), strict=True)]


def loop(name):
    lp, hat, kl = (segments(numbers()[n]) for n in ("logprobs", "extrapolated_logprobs", "forward_kl"))
    r, means = ratios(), [part.mean() for part in lp]
    if name == "rft":
        right = [lp[i] for i in range(6) if REWARDS[i] > 0]
        return -sum(part.sum() for part in right) / sum(len(part) for part in right)
    if name in ("dpo", "rpo"):
        losses = [-math.log(sigmoid(0.1 * (r[w] - r[x]))) for w, x in cover()]
        return np.mean([x - (means[w] if name == "rpo" else 0) for x, (w, _) in zip(losses, cover(), strict=True)])
    if name == "ipo":
        normal = [ratio / length for ratio, length in zip(r, LENS, strict=True)]
        return np.mean([(normal[w] - normal[x] - 1 / 0.2) ** 2 for w, x in cover()])
    if name == "simpo":
        return np.mean([-math.log(sigmoid(2.0 * (means[w] - means[x]) - 1.0)) for w, x in cover()])
    if name == "simper":
        return np.mean([math.exp(means[x]) - math.exp(means[w]) for w, x in cover()])
    if name == "kto":
        old, ref = segments(numbers()["old_logprobs"]), segments(numbers()["ref_logprobs"])
        z0 = np.mean([o.sum() - f.sum() for o, f in zip(old, ref, strict=True)])
        return np.mean([1 - sigmoid(0.1 * (r[i] - z0) * REWARDS[i]) for i in range(6)])
    if name == "a_star_po":
        values = {}
        for group in set(GROUPS):
            rewards = [R for R, g in zip(REWARDS, GROUPS, strict=True) if g == group]
            values[group] = 0.5 * math.log(np.mean([math.exp(R / 0.5) for R in rewards]))
        return np.mean([(1e-3 * r[i] - (REWARDS[i] - values[GROUPS[i]])) ** 2 for i in range(6)])
    if name in ("off_rl", "off_rl_kl"):
        plain = np.mean([-REWARDS[i] * math.exp(means[i]) for i in range(6)])
        return plain + (0.04 * np.mean([part.sum() for part in kl]) if name == "off_rl_kl" else 0)
    future = [math.exp(part.mean()) for part in hat]
    ahead = {"fpa": (True, True), "fpa_correct": (True, False), "fpa_incorrect": (False, True)}[name]
    weight = [future[i] if ahead[REWARDS[i] < 0] else math.exp(means[i]) for i in range(6)]
    return np.mean([-REWARDS[i] * weight[i] * means[i] for i in range(6)])


OBJECTIVES = {name: made(name) for name in OFFLINE if name != "offline_distil"} | {  # test_distil.py has it
    "off_rl_kl": made("off_rl", kl_coefficient=0.04),
    "fpa_correct": made("fpa", fpa_on="correct"),
    "fpa_incorrect": made("fpa", fpa_on="incorrect"),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_equals_an_independent_loop(name):
    found, _, _ = evaluated(OBJECTIVES[name])
    assert found == pytest.approx(loop(name), rel=1e-7)  # A*-PO's values are fp32


# ---- closed forms at pi = pi_ref, and values by hand


@pytest.mark.parametrize(
    "objective,expected",
    [
        (made("dpo"), math.log(2)),
        (made("dpo", beta=3.0), math.log(2)),
        (made("ipo", beta=0.25), 4.0),  # (0 - 1 / (2/4))^2
        (made("ipo", beta=0.25, length_normalised=False), 4.0),
        (made("kto"), 0.5),  # sigmoid(0) = 1/2, and z0 is 0
        (made("kto", weight_correct=2.0), (2 * 3 + 3) / 6 / 2),
    ],
    ids=lambda value: value.options.name if hasattr(value, "options") else repr(value),
)
def test_closed_form_at_the_reference(objective, expected):
    same = torch.tensor(numbers()["ref_logprobs"])
    whole = data().with_tokens(old_logprobs=same)
    batch, index = drawn(objective, whole)
    found, logged, _ = evaluated(objective, batch, index, logprobs=same.clone())
    assert found == pytest.approx(expected, rel=1e-12)
    assert logged["dynamics/log_ratio_correct"] == logged["dynamics/log_ratio_incorrect"] == 0.0


def test_dpos_gradient_at_the_reference_is_half_beta():
    """The loss falls by beta/2 per unit on each token of the right one and rises as much on the wrong one; 3 pairs."""
    same = torch.tensor(numbers()["ref_logprobs"])
    batch, index = drawn(made("dpo"))
    _, _, gradient = evaluated(made("dpo"), batch, index, logprobs=same.clone())
    signs = batch.sequences["rewards"][batch.sequence_ids].double()
    torch.testing.assert_close(gradient, -signs * 0.1 / 2 / 3)


def simple(rewards, logprobs, **tokens):
    """One problem's sequences of one token each."""
    ref = tokens.pop("ref_logprobs", torch.zeros(len(rewards), dtype=torch.float64))
    sequences = {"group": torch.zeros(len(rewards), dtype=torch.long), "rewards": torch.tensor(rewards)}
    batch = Batch.of([[1]] * len(rewards), [[2]] * len(rewards), tokens={"ref_logprobs": ref}, sequences=sequences)
    return batch, torch.tensor(logprobs, dtype=torch.float64)


def loss_of(objective, batch, outputs):
    (update,) = objective.prepare(objective.annotate(batch), {}).updates
    return update.loss(outputs, update.batch).mean(counts(update.batch)).item()


def test_off_rl_and_fpa_by_hand():
    """Right with probability 1/2, wrong with 1/4: -(1/2 - 1/4) / 2. With pi_hat 3/4 and 1/16 as weights of log 1/2 and
    log 1/4: -(3/4 log 1/2 - 1/16 log 1/4) / 2 = (3/8 - 1/16) log 2."""
    batch, logprobs = simple([1.0, -1.0], [math.log(0.5), math.log(0.25)])
    assert loss_of(made("off_rl"), batch, {"logprobs": logprobs}) == pytest.approx(-0.125)
    outputs = {"logprobs": logprobs, "extrapolated_logprobs": torch.tensor([0.75, 1 / 16]).double().log()}
    assert loss_of(made("fpa"), batch, outputs) == pytest.approx(5 / 16 * math.log(2))
    only_wrong = made("fpa", fpa_on="incorrect")  # -(1/2 log 1/2 - 1/16 log 1/4) / 2
    assert loss_of(only_wrong, batch, outputs) == pytest.approx((0.25 - 1 / 16) * math.log(2))


def test_pairs_by_hand():
    """Log-ratios log 3 and 0: DPO at beta 1 is log(4/3), RPO adds half of log 2, IPO (log 3 - 1/2)^2."""
    batch, logprobs = simple([1.0, -1.0], [math.log(0.5), math.log(0.25)])
    batch = batch.with_tokens(ref_logprobs=torch.tensor([1 / 6, 1 / 4]).double().log())
    batch = batch.with_sequences(unit=torch.zeros(2, dtype=torch.long))
    outputs = {"logprobs": logprobs}
    assert loss_of(made("dpo", beta=1.0), batch, outputs) == pytest.approx(math.log(4 / 3))
    assert loss_of(made("rpo", beta=1.0, alpha=0.5), batch, outputs) == pytest.approx(
        math.log(4 / 3) + 0.5 * math.log(2)
    )
    assert loss_of(made("ipo", beta=1.0), batch, outputs) == pytest.approx((math.log(3) - 0.5) ** 2)
    assert loss_of(made("simper"), batch, outputs) == pytest.approx(-0.25)
    assert loss_of(made("simpo", beta=1.0, gamma=math.log(2)), batch, outputs) == pytest.approx(math.log(2))


def test_single_trajectories_by_hand():
    """Log-ratios log 3 and 0, so that z0 is log(3)/2: KTO is 1 - sigmoid(log(3)/2) on both sides. A*-PO's V is
    log cosh 1 at beta1 1. A mean KL of 0.3 adds half of it to Off-RL's -1/8. SFT is log 2 of the right one."""
    batch, logprobs = simple([1.0, -1.0], [math.log(0.5), math.log(0.25)])
    batch = batch.with_tokens(ref_logprobs=torch.tensor([1 / 6, 1 / 4]).double().log(), old_logprobs=logprobs)
    outputs, value = {"logprobs": logprobs}, math.log(math.cosh(1))
    assert loss_of(made("kto", beta=1.0), batch, outputs) == pytest.approx(1 / (1 + 3**0.5))
    regression = ((math.log(3) - 1 + value) ** 2 + (1 + value) ** 2) / 2
    assert loss_of(made("a_star_po", beta1=1.0, beta2=1.0), batch, outputs) == pytest.approx(regression, rel=1e-6)
    divergence = {"forward_kl": torch.tensor([0.2, 0.4]).double()}
    assert loss_of(made("off_rl", kl_coefficient=0.5), batch, outputs | divergence) == pytest.approx(0.025)
    right = batch.select(torch.tensor([0]))
    assert loss_of(made("rft"), right, {"logprobs": logprobs[:1]}) == pytest.approx(math.log(2))


def test_a_trajectory_without_a_trained_token_moves_no_loss():
    """Nor KTO's z0, which is a mean over the trajectories that are trained."""
    batch, logprobs = simple([1.0, -1.0, 1.0], [math.log(0.5), math.log(0.25), math.log(0.125)])
    refs = torch.tensor([1 / 6, 1 / 4, 1 / 2]).double().log()
    masked = batch.with_tokens(ref_logprobs=refs, old_logprobs=logprobs, response_mask=torch.tensor([1.0, 1.0, 0.0]))
    kept = masked.select(torch.tensor([0, 1]))
    for method in (made("kto", beta=1.0), made("fpa"), made("off_rl")):
        outputs = {"logprobs": logprobs, "extrapolated_logprobs": logprobs, "forward_kl": logprobs}
        cut = {name: values[:2] for name, values in outputs.items()}
        assert loss_of(method, masked, outputs) == pytest.approx(loss_of(method, kept, cut)), method


def test_optimal_values_by_hand():
    """beta 1: log((e + 1/e) / 2) with one right of two, +1 and -1 where all are. Small: the best; large: the mean."""
    rewards, groups = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0]), torch.tensor([3, 3, 5, 5, 8])
    values = optimal_values(rewards, groups, 1.0)
    torch.testing.assert_close(values, torch.tensor([math.log(math.cosh(1))] * 2 + [1.0, 1.0, -1.0]))
    torch.testing.assert_close(optimal_values(rewards, groups, 1e-3)[:2], torch.ones(2), atol=1e-3, rtol=0)
    torch.testing.assert_close(optimal_values(rewards, groups, 1e20)[:2], torch.zeros(2))
    assert made("a_star_po", beta1=1.0).annotate(data()).sequences["value"].shape == (6,)


# ---- Property 1 (exact gradients)


def test_fpa_without_extrapolation_has_off_rls_gradient():
    given = torch.tensor(numbers()["logprobs"])
    _, _, fpa = evaluated(made("fpa", extrapolation=0.0), extrapolated_logprobs=given)
    _, _, off_rl = evaluated(made("off_rl"))
    torch.testing.assert_close(fpa, off_rl, rtol=1e-14, atol=0)


def test_simper_has_off_rls_gradient_on_balanced_pairs():
    """On the same pairs; Off-RL averages over trajectories, of which a pair has two."""
    batch, index = drawn(made("simper"))
    _, _, simper = evaluated(made("simper"), batch, index)
    _, _, off_rl = evaluated(made("off_rl"), batch, index)
    torch.testing.assert_close(simper, 2 * off_rl, rtol=1e-14, atol=0)


def test_dpo_on_the_future_policy_is_dpo_at_a_larger_beta():
    """log pi_hat - log pi_ref = (1 + lambda)(log pi - log pi_ref) + C(x) on the level of sequences (fpa.txt Eq. 26)."""
    lam, ref = 2.0, torch.tensor(numbers()["ref_logprobs"])
    batch, index = drawn(made("dpo"))
    shift = torch.tensor([0.3, -0.2])[torch.tensor(GROUPS) // 8].double()  # C(x) of either problem
    per_token = (shift / torch.tensor(LENS))[data().sequence_ids]

    def future(logprobs):
        return ref + (1 + lam) * (logprobs - ref) + per_token

    logprobs = torch.tensor(numbers()["logprobs"], requires_grad=True)
    on_future, _, gradient = evaluated(made("dpo", beta=0.1), batch, index, logprobs=future(logprobs).detach())
    larger, _, expected = evaluated(made("dpo", beta=0.1 * (1 + lam)), batch, index)
    assert on_future == pytest.approx(larger, rel=1e-12)
    torch.testing.assert_close((1 + lam) * gradient, expected, rtol=1e-10, atol=0)  # d pi_hat / d pi is 1 + lambda


# ---- parts, cuts and fillers


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_parts_gradients_add_up(name):
    objective = OBJECTIVES[name]
    batch, index = drawn(objective)
    (update,) = objective.prepare(batch, {}).updates
    found = {}
    for part in ("correct", "incorrect", None):
        named = data().with_tokens(**{n: torch.tensor(v) for n, v in numbers().items()}).select(index).tokens
        outputs = {n: named[n].requires_grad_(n in ("logprobs", "forward_kl")) for n in update.outputs}
        loss = part_of(update.loss, part) if part else update.loss
        mean = loss(outputs, update.batch).mean(counts(update.batch))
        found[part] = torch.autograd.grad(mean, outputs["logprobs"], allow_unused=True)[0]
        assert mean.item() == pytest.approx(loop(name), rel=1e-7)
    torch.testing.assert_close(found["correct"] + found["incorrect"], found[None])
    right = (batch.sequences["rewards"] > 0)[batch.sequence_ids]
    assert not found["correct"][~right].any() and not found["incorrect"][right].any()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_any_cut_gives_the_same_and_a_rank_without_work_adds_nothing(name):
    """Units one by one, and a filler with a sequence without trained tokens."""
    objective = OBJECTIVES[name]
    batch, index = drawn(objective)
    (update,) = objective.prepare(batch, {}).updates
    whole = update.batch.with_tokens(
        **data().with_tokens(**{n: torch.tensor(v) for n, v in numbers().items()}).select(index).tokens
    )
    number, parts = counts(update.batch), [whole.select(whole.units == unit) for unit in whole.units.unique()]
    filler = whole.select(torch.tensor([0]))
    parts.append(filler.with_tokens(response_mask=torch.zeros(len(filler.response_ids))))
    total, logged = 0.0, []
    for part in parts:
        outputs = {n: part.tokens[n].requires_grad_() for n in update.outputs}
        loss = update.loss(outputs, part)
        loss.mean(number).backward()  # a filler too
        total += loss.mean(number).item()
        logged.append({name: share.item() for name, share in loss.logged(number).items()})
    expected, expected_logged, _ = evaluated(objective)
    assert total == pytest.approx(expected, rel=1e-12)
    for key, value in expected_logged.items():
        assert sum(each[key] for each in logged) == pytest.approx(value, rel=1e-12, nan_ok=True), key


def test_rft_has_no_dynamics_of_wrong_trajectories():
    """It trains on none, and a mean over none is no number."""
    _, logged, _ = evaluated(made("rft"))
    assert logged["dynamics/weight_correct"] > 0 and logged["dynamics/low_weight_incorrect"] == 0
    assert math.isnan(logged["dynamics/weight_incorrect"]) and math.isnan(logged["dynamics/log_ratio_incorrect"])


def test_dynamics_by_hand():
    """Right: pi 1/2, reference 1/4. Wrong: pi 1/8 and 1/2, reference 1/2 both. Below 0.2: one of the wrong ones; FPA's
    weights of both, and one of them is below 0.01."""
    batch, logprobs = simple([1.0, -1.0, -1.0], [math.log(x) for x in (0.5, 0.125, 0.5)])
    batch = batch.with_tokens(ref_logprobs=torch.tensor([0.25, 0.5, 0.5]).double().log())
    outputs = {"logprobs": logprobs, "extrapolated_logprobs": torch.tensor([0.75, 0.0625, 0.005]).double().log()}
    loss, number = made("fpa").loss(outputs, batch), counts(batch)
    found = {n: s.total.item() / number[s.per] for n, s in loss.metrics.items()}
    assert found == pytest.approx(
        {
            "dynamics/log_ratio_correct": math.log(2),
            "dynamics/log_ratio_incorrect": -math.log(4) / 2,
            "dynamics/weight_correct": 0.5,
            "dynamics/weight_incorrect": 5 / 16,
            "dynamics/future_weight_correct": 0.75,
            "dynamics/future_weight_incorrect": 0.0675 / 2,
            "dynamics/future_weight_saturated": 1 / 3,
            "dynamics/future_ratio_correct": 1.5,
            "dynamics/future_ratio_incorrect": (0.5 + 0.01) / 2,
            "dynamics/low_weight_incorrect": 1.0,
            "dynamics/low_future_weight_incorrect": 2.0,
        }
    )


@pytest.mark.parametrize("how, expected", [("sequence_sum", (0.1 + 0.2 + 0.6) / 2), ("token_mean", 0.9 / 3)])
def test_the_kl_of_off_rl_is_a_sum_over_the_trajectory(how, expected):
    """Two trajectories of 2 and 1 tokens with divergences (0.1, 0.2) and 0.6, and probabilities of 1 that cancel."""
    tokens = {"ref_logprobs": torch.zeros(3)}
    sequences = {"group": torch.zeros(2, dtype=torch.long), "rewards": torch.tensor([1.0, -1.0])}
    batch = Batch.of([[1]] * 2, [[1, 2], [3]], tokens=tokens, sequences=sequences)
    outputs = {"logprobs": torch.zeros(3), "forward_kl": torch.tensor([0.1, 0.2, 0.6])}
    objective = made("off_rl", kl_coefficient=2.0, kl_aggregation=how)
    assert objective.loss(outputs, batch).mean(counts(batch)).item() == pytest.approx(2 * expected)


def test_only_what_is_needed_is_asked_for():
    assert made("off_rl").outputs == {"logprobs"} and made("off_rl").second is None
    assert made("off_rl", kl_coefficient=0.1).outputs == {"logprobs", "forward_kl"}
    assert made("off_rl", kl_coefficient=0.1).second.weights == "reference"
    assert made("fpa", extrapolation=2.0).second.extrapolation == 2.0
    assert made("fpa", kl_coefficient=0.1).outputs == {"logprobs", "forward_kl", "extrapolated_logprobs"}
    assert made("kto").needs == {"ref_logprobs", "old_logprobs"} and made("rft").needs == {"ref_logprobs"}
