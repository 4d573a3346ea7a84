"""Episodes with segments against numpy loops over whole episodes, made from the nested responses alone: losses, their
gradients, and PIPO's verification."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_rft.objectives.base import Update, counts
from megatron_rft.records import Batch
from megatron_rft.responses import Prompt, Response, Score
from megatron_rft.rollout.sampler import ScoredResponse, to_batch
from tests.made import made, pipo
from tests.unit.objectives import numpy_loops as loops
from tests.unit.objectives.test_online import TOKENS, everything

OUTPUTS = {"logp": "logprobs", "entropy": "entropy", "kl": "reverse_kl", "value": "values"}
OPTIONS = {
    "grpo": {"kl_coefficient": 0.1, "aggregation": "group_mean"},
    "dapo": {"overlong_buffer": 12, "max_response_tokens": 14, "filter_groups": False},
    "rloo": {"kl_coefficient": 0.1, "aggregation": "sequence_mean"},  # the KL is in the reward
    "reinforce_plus_plus": {"gamma": 0.9, "kl_coefficient": 0.1},
    "ppo": {"gamma": 0.9, "lam": 0.8, "kl_coefficient": 0.1},
}
REWARDS, GROUPS = [1.0, 0.0, 1.0, 0.5, 0.0, 0.25], [0, 0, 0, 1, 1, 1]


def episode(random: np.random.Generator, segments: int) -> Response:
    """Turns of one to three tokens in random segments, with an environment's tokens before some of them."""
    of = [*range(segments - 1), *random.integers(0, segments, 4), segments - 1]
    parts = []
    for segment in range(segments):
        ids, turns = [], []
        for _ in range(of.count(segment)):
            ids += random.integers(50, 99, random.integers(0, 3) if ids else 0).tolist()
            turns.append((len(ids), len(ids) + int(random.integers(1, 4)), 0.0))
            ids += random.integers(10, 50, turns[-1][1] - len(ids)).tolist()
        prompt = tuple(random.integers(1, 10, random.integers(1, 4)).tolist())
        order = tuple(when for when, which in enumerate(of) if which == segment)
        logprobs = tuple(random.uniform(-3, -0.1, len(ids)))
        parts.append(Response(tuple(ids), logprobs, "stop", 0, (), tuple(turns), prompt, order=order))
    return replace(parts[-1], segments=tuple(parts[:-1]))


def sampled(response: Response) -> tuple[list[int], list[float], int]:
    """By a loop over segments: the policy's tokens in the order of sampling, their log-probs, and the number of tokens
    that the model reads behind the first prompt."""
    parts, turns = (*response.segments, response), []
    for part in parts:
        for when, (first, end, _) in zip(part.order, part.turns, strict=True):
            turns.append((when, part.token_ids[first:end], part.logprobs[first:end]))
    turns.sort()
    read = sum(len(part.token_ids) + len(part.prompt_ids) for part in parts) - len(parts[0].prompt_ids)
    return [i for _, ids, _ in turns for i in ids], [x for *_, logprobs in turns for x in logprobs], read


@pytest.fixture
def made_case() -> tuple[Batch, list[dict], torch.Tensor]:
    """A batch, its episodes for the loops, and the places of the policy's tokens in the batch. The loops' episodes have
    the policy's tokens first, then as many of others as the model reads."""
    random = np.random.default_rng(3)
    played = [episode(random, segments) for segments in (1, 3, 2, 4, 1, 2)]
    rollouts = [
        ScoredResponse(group, i, Prompt(group, (1, 2), "", ""), response.joined(), "", Score(reward))
        for i, (group, response, reward) in enumerate(zip(GROUPS, played, REWARDS, strict=True))
    ]
    batch, rows = to_batch(rollouts), []
    for response, reward, group in zip(played, REWARDS, GROUPS, strict=True):
        _, logprobs, read = sampled(response)
        parts = (*response.segments, response)
        longest = max(len(part.prompt_ids) + len(part.token_ids) for part in parts) - len(parts[0].prompt_ids)
        rollout = np.array([*logprobs, *[0.0] * (read - len(logprobs))])
        old, mask = rollout + 0.1 * random.normal(size=read), (np.arange(read) < len(logprobs)).astype(float)
        row = {"group": group, "reward": reward, "mask": mask, "rollout": rollout, "old": old, "longest": longest}
        row |= {"logp": old + random.uniform(-0.3, 0.3, read), "ref": old + random.normal(size=read)}
        row |= {"entropy": random.uniform(0, 2, read), "value": random.normal(size=read)}
        rows.append(row | {"kl": random.uniform(0, 1, read)})
    places = batch.response_mask.nonzero().flatten()
    assert batch.response_ids[places].tolist() == [token for each in played for token in sampled(each)[0]]
    return batch.with_tokens(**laid_out(rows, TOKENS, batch, places)), rows, places


def laid_out(rows: list[dict], names: dict[str, str], batch: Batch, places: torch.Tensor) -> dict[str, torch.Tensor]:
    """The loops' values on the policy's tokens of the batch, and absurd ones where nobody may look."""
    named = {name: torch.full((len(batch.response_ids),), 1e4, dtype=torch.float64) for name in names.values()}
    for key, name in names.items():
        named[name][places] = torch.tensor(np.concatenate([row[key][row["mask"] > 0] for row in rows]))
    return named


def loss_and_slopes(update: Update, rows: list[dict], places: torch.Tensor) -> tuple[float, np.ndarray]:
    """The update's loss, and its derivatives by the log-probs of the policy's tokens."""
    outputs = laid_out(rows, OUTPUTS, update.batch, places)
    outputs["logprobs"].requires_grad_()
    (steps,) = update.steps()
    loss = update.loss(outputs, steps).mean(counts(steps))
    loss.backward()
    slopes = outputs["logprobs"].grad
    assert not slopes.index_fill(0, places, 0.0).any()
    return loss.item(), slopes[places].numpy()


def differences(rows: list[dict], name: str, loss: Callable[[], float]) -> np.ndarray:
    """The derivatives of a loop's loss, by central differences. CISPO's ratios have no gradient."""
    slopes, moved = [], ("logp", "old") if name == "cispo" else ("logp",)
    for row in rows:
        for t in np.flatnonzero(row["mask"]):
            before, sides = {key: row[key][t] for key in moved}, []
            for step in (1e-6, -1e-6, 0.0):
                for key in moved:
                    row[key][t] = before[key] + step
                sides.append(loss())
            slopes.append((sides[0] - sides[1]) / 2e-6)
    return np.array(slopes)


@pytest.mark.parametrize("name", loops.NAMES)
def test_loss_and_gradient_are_those_of_loops_over_episodes(name, made_case):
    batch, rows, places = made_case
    objective = made(name, **OPTIONS.get(name, {}))
    options = everything(objective)
    (update,) = (each for each in objective.prepare(batch, objective.init()).updates if each.name == "policy")
    loss, slopes = loss_and_slopes(update, rows, places)
    assert loss == pytest.approx(loops.policy_loss(rows, name, options), rel=1e-5)
    wanted = differences(rows, name, lambda: loops.policy_loss(rows, name, options))
    np.testing.assert_allclose(slopes, wanted, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", loops.NAMES)
def test_pipo_verifies_the_credit_of_episodes(name, made_case):
    """The mean reward of episodes rises, so that the step repeats the base's surrogate, without KL, with credit that is
    normalised by group where the base compares responses."""
    batch, rows, places = made_case
    objective = pipo(made(name, **(OPTIONS.get(name, {}) | {"kl_coefficient": 0.0})), window=2)
    state, mu = objective.init(), []
    for mean in (0.1, 0.2, 0.4):
        prepared = objective.prepare(batch.with_scalars(sampled_reward_sum=6 * mean, sampled_count=6.0), state)
        state = prepared.state
        mu.append(prepared.metrics["pipo/mu"])
    verification, *_ = prepared.updates
    options = everything(objective.base)
    credit = loops.advantages(rows, name, options)
    if name not in ("ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        for group in (0, 1):
            members = [n for n, row in enumerate(rows) if row["group"] == group]
            total = sum(abs(credit[n][0]) for n in members)
            for n in members:
                credit[n] = [len(members) * value / total for value in credit[n]]

    def surrogate() -> float:
        terms = [loops.surrogate(row, a, name, options) for row, a in zip(rows, credit, strict=True)]
        return loops.mean(rows, terms, options["aggregation"], options["max_response_tokens"])

    loss, slopes = loss_and_slopes(verification, rows, places)
    assert mu == pytest.approx([0.1, 0.2, 0.4]) and verification.scale > 0
    assert loss == pytest.approx(surrogate(), rel=1e-4)
    np.testing.assert_allclose(slopes, differences(rows, name, surrogate), rtol=1e-3, atol=1e-7)


def test_the_critic_learns_from_episodes(made_case):
    batch, rows, places = made_case
    objective = made("ppo", **OPTIONS["ppo"])
    update, _ = objective.prepare(batch, objective.init()).updates
    (steps,) = update.steps()
    outputs = laid_out(rows, OUTPUTS, batch, places)
    outputs["values"] = outputs["values"] + 0.3
    new = [row["value"] + 0.3 for row in rows]
    wanted = loops.value_loss(rows, new, everything(objective))
    assert float(update.loss(outputs, steps).mean(counts(steps))) == pytest.approx(wanted, rel=1e-5)


def test_counts_are_of_episodes(made_case):
    batch, rows, places = made_case
    assert len(batch) == 6 and counts(batch) == {
        "response_tokens": float(len(places)), "sequences": 6.0, "groups": 2.0, "units": 6.0,
    }  # fmt: skip
    assert batch.by_segment()[0].response_lens.shape == (13,)
