"""Every online objective against loops in numpy, on ragged batches with all edge cases; and every option of every
objective has an effect."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from megatron_rft.config.algorithms import SECTIONS
from megatron_rft.objectives.base import Objective, counts
from megatron_rft.records import Batch
from tests.made import ONLINE, made, pipo
from tests.unit.objectives import numpy_loops as loops

LIMIT = 6
TOKENS = {
    "old": "old_logprobs",
    "ref": "ref_logprobs",
    "rollout": "rollout_logprobs",
    "value": "values",
}
COMMON = {
    "clip_low": st.sampled_from([0.0, 0.1, 0.2]),
    "clip_high": st.sampled_from([0.05, 0.3]),
    "aggregation": st.sampled_from(["sequence_mean", "token_mean", "group_mean", "sequence_sum", "constant"]),
    "kl_coefficient": st.sampled_from([0.0, 0.1]),
    "kl_estimator": st.sampled_from([None, "k1", "k2", "k3", "exact"]),
    "kl_in": st.sampled_from(["loss", "reward"]),
    "entropy_coefficient": st.sampled_from([0.0, 0.02]),
    "importance": st.sampled_from(["none", "truncated", "masked"]),
    "importance_cap": st.sampled_from([1.05, 2.0]),
}
OWN = {
    "dual_clip": st.sampled_from([None, 1.05]),
    "overlong_buffer": st.sampled_from([0, 3]),
    "overlong_coefficient": st.sampled_from([0.5, 1.0]),
    "gamma": st.sampled_from([0.9, 1.0]),
    "lam": st.sampled_from([0.0, 0.95, 1.0]),
    "whiten_advantages": st.booleans(),
}


def alive(options: dict) -> dict:
    """The options without those that have no effect in this combination, which a section refuses."""
    dead = set()
    dead |= {"kl_estimator", "kl_in"} if not options.get("kl_coefficient") else set()
    dead |= {"kl_estimator"} if (options["kl_estimator"] == "k1") != (options["kl_in"] == "reward") else set()
    dead |= {"importance_cap"} if options.get("importance") == "none" else set()
    dead |= {"overlong_coefficient"} if options.get("overlong_buffer") == 0 else set()
    return {key: value for key, value in options.items() if key not in dead}


def everything(objective) -> dict:
    """All options, of the section, the run and the critic."""
    run, critic = vars(objective.setting), objective.setting.critic
    own = objective.options.model_dump() | {"kl_estimator": objective.options.estimator}
    return own | run | ({"value_clip": critic.value_clip} if critic else {})


@st.composite
def cases(draw, name: str):
    """(options, sequences): lengths 0 to LIMIT, groups of one to four, rewards that are often equal, masked tokens."""
    known = {key: value for key, value in (COMMON | OWN).items() if key in SECTIONS[name].model_fields}
    options = {"max_response_tokens": LIMIT} | alive({key: draw(value) for key, value in known.items()})
    random = np.random.default_rng(draw(st.integers(0, 10_000)))
    sequences = []
    for group in range(draw(st.integers(1, 3))):
        for _ in range(draw(st.integers(1, 4))):
            length = draw(st.sampled_from([0, 1, 2, LIMIT]))
            old = random.uniform(-3, -0.1, length)
            sequences.append(
                {
                    "group": 7 - group,
                    "reward": draw(st.sampled_from([-1.0, 0.0, 0.0, 1.0])),
                    "mask": (random.uniform(size=length) < draw(st.sampled_from([0.0, 0.7, 1.0, 1.0]))).astype(float),
                    "old": old,
                    "logp": old + random.uniform(-0.5, 0.5, length) * random.integers(0, 2, length),
                    "ref": old + random.normal(size=length),
                    "rollout": old + 0.2 * random.normal(size=length),
                    "entropy": random.uniform(0, 2, length),
                    "value": random.normal(size=length),
                    "kl": random.uniform(0, 1, length),
                }
            )
    return options, sequences


def as_batch(sequences: list[dict]) -> Batch:
    joined = {key: torch.tensor(np.concatenate([s[key] for s in sequences])) for key in (*TOKENS, "mask")}
    joined["mask"] = joined["mask"].float()
    return Batch.of(
        [[1, 2]] * len(sequences),
        [[5] * len(s["mask"]) for s in sequences],
        tokens={TOKENS.get(key, "response_mask"): value for key, value in joined.items()},
        sequences={
            "group": torch.tensor([s["group"] for s in sequences]),
            "rewards": torch.tensor([s["reward"] for s in sequences]),
        },
    )


def model_outputs(sequences: list[dict]) -> dict[str, torch.Tensor]:
    names = {"logp": "logprobs", "entropy": "entropy", "kl": "reverse_kl", "value": "values"}
    return {name: torch.tensor(np.concatenate([s[key] for s in sequences])) for key, name in names.items()}


def one_step(objective, batch: Batch, outputs: dict, update: str = "policy") -> float:
    """The update's loss with the batch as one mini-batch."""
    (found,) = [u for u in objective.prepare(batch, objective.init()).updates if u.name == update]
    losses = [found.loss(outputs, mini_batch).mean(counts(mini_batch)) for mini_batch in found.steps()]
    return float(losses[0]) if losses else 0.0  # dapo without a kept group


@pytest.mark.parametrize("name", sorted(set(ONLINE) - set(loops.NAMES)))
def test_an_algorithm_without_loops_has_a_test_of_its_own(name):
    assert Path(__file__).with_name(f"test_{name}.py").exists()


@pytest.mark.parametrize("name", loops.NAMES)
@given(data=st.data())
@settings(max_examples=30)
def test_loss_is_that_of_the_loops(name, data):
    options, sequences = data.draw(cases(name))
    objective = made(name, **options)
    found = one_step(objective, as_batch(sequences), model_outputs(sequences))
    wanted = loops.policy_loss(sequences, name, everything(objective))
    assert found == pytest.approx(wanted, rel=1e-6, abs=1e-6)


@given(data=st.data())
@settings(max_examples=30)
def test_value_loss_and_attributions_are_those_of_the_loops(data):
    options, sequences = data.draw(cases("ppo"))
    critic = {"value_clip": data.draw(st.sampled_from([0.1, 0.5]))}
    objective, batch, outputs = made("ppo", critic, **options), as_batch(sequences), model_outputs(sequences)
    outputs["values"] = outputs["values"] + 0.3
    new = [s["value"] + 0.3 for s in sequences]
    defaults = everything(objective)
    wanted = loops.value_loss(sequences, new, defaults)
    assert one_step(objective, batch, outputs, "value") == pytest.approx(wanted, rel=1e-6, abs=1e-6)
    credit = np.concatenate([np.zeros(0), *loops.advantages(sequences, "ppo", defaults)])
    own = batch.response_mask.numpy() > 0
    np.testing.assert_allclose(objective.advantages(batch).numpy()[own], credit[own], rtol=1e-4, atol=1e-5)


# ---- an option that can be set changes something

# Values to try for an option beside the words of its type; the section refuses those that do not fit.
VALUES = (True, False, 0.05, 0.3, 0.5, 1.01, 2, 3, 50)
OF_THE_RUN = {"mini_batches": 2, "max_response_tokens": 50}
# What else must be set for an option to matter.
BESIDE = {
    "importance_cap": {"importance": "truncated"},
    "overlong_coefficient": {"overlong_buffer": 3},
    "kl_estimator": {"kl_coefficient": 0.1, "kl_in": "loss"},
    "kl_in": {"kl_coefficient": 0.1},
    "max_response_tokens": {"aggregation": "constant"},
}
SEQUENCES = [
    {
        "group": g,
        "reward": r,
        "mask": np.ones(n),
        "old": np.linspace(-2, -1, n),
        "logp": np.linspace(-2, -1, n) + np.linspace(-0.4, 0.6, n) * sign,
        "ref": np.linspace(-1, -3, n),
        "rollout": np.linspace(-2, -1, n) + np.linspace(0.3, -0.3, n),
        "entropy": np.linspace(1, 2, n),
        "value": np.linspace(0.2, 0.6, n),
        "kl": np.linspace(0.1, 0.4, n),
    }
    for g, r, n, sign in [
        (0, 1, 6, 1),
        (0, 0, 4, 1),
        (1, 0, 5, -1),
        (1, 1, 2, 1),
        (1, 0, 6, 1),
        (2, 1, 1, 1),
        (2, 1, 3, 1),
    ]
]


def fingerprint(objective) -> tuple:
    """All results of an objective on one fixed batch: what it keeps, and each step's loss and gradient."""
    batch = as_batch(SEQUENCES).with_contexts([[1, 2, 3]] * len(SEQUENCES))
    batch = batch.with_tokens(
        teacher_logprobs=batch.tokens["ref_logprobs"], place=torch.arange(len(batch.response_ids))
    )
    batch = batch.with_scalars(sampled_reward_sum=3.0, sampled_count=7.0)
    found = [tuple(objective.keep(batch).tolist())]
    for update in objective.prepare(batch, objective.init()).updates:
        found.append((update.name, str(update.second), update.moments, update.learning_rate))
        for mini_batch in update.steps():
            place = mini_batch.tokens["place"]
            leaves = {k: v[place].clone().requires_grad_() for k, v in model_outputs(SEQUENCES).items()}
            leaves["values"] = leaves["values"] + 0.3
            outputs = leaves | {"other_logprobs": mini_batch.tokens["ref_logprobs"].double()}
            loss = update.loss(outputs, mini_batch).mean(counts(mini_batch))
            grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
            found.append((round(loss.item(), 9), *(None if g is None else tuple(g.tolist()) for g in grads)))
    return tuple(found)


# Options that others read: the trainer, the sampler, what tells the teacher.
NOT_THE_OBJECTIVES = {"name", "mini_batch_prompts", "old_logprobs", "max_rounds", "feedback", "solution_field"}
NOT_THE_OBJECTIVES |= {"max_feedback_tokens", "teacher_template", "solution_template", "error_template"}
EVERY_OPTION = [
    (name, option)
    for name in sorted(set(ONLINE) - {"distil"})  # test_distil.py
    for option in (*sorted(SECTIONS[name].model_fields.keys() - NOT_THE_OBJECTIVES), *OF_THE_RUN)
    if (name, option) not in {("sdpo", "clip_low"), ("sdpo", "clip_high")}  # see below
]


@pytest.mark.parametrize("name, option", EVERY_OPTION)
def test_every_option_changes_what_the_objective_does(name, option):
    """sdpo's clip is that of PIPO's step."""
    beside = {} if (name, option) == ("sdpo", "importance_cap") else BESIDE.get(option, {})
    given = {"max_response_tokens": 6} | beside
    default = fingerprint(made(name, **given))
    assert any(fingerprint(other) != default for other in made_with_others(name, option, given))


def made_with_others(name: str, option: str, given: dict) -> Iterator[Objective]:
    """The algorithm with each value that the option may have."""
    if option in OF_THE_RUN:
        yield made(name, **given | {option: OF_THE_RUN[option]})
        return
    for value in (*words(SECTIONS[name].model_fields[option].annotation), *VALUES):
        with suppress(ValidationError):
            yield made(name, **given | {option: value})


def words(annotation: Any) -> list[str]:
    parts = get_args(annotation)
    return [part for part in parts if isinstance(part, str)] + [word for part in parts for word in words(part)]


@pytest.mark.parametrize("critic", [{"value_clip": 0.01}, {"warmup_steps": 5}])
def test_the_critics_options_change_what_ppo_does(critic):
    assert fingerprint(made("ppo", critic)) != fingerprint(made("ppo"))


@pytest.mark.parametrize("option, other", [("clip_low", 0.05), ("clip_high", 0.07)])
def test_the_clip_of_sdpo_is_that_of_the_verification_step(option, other):
    batch = as_batch(SEQUENCES).with_tokens(advantages=torch.linspace(-1, 1, 27))
    losses = [
        pipo(made("sdpo", **options)).surrogate(model_outputs(SEQUENCES), batch).mean(counts(batch)).item()
        for options in ({}, {option: other})
    ]
    assert losses[0] != losses[1]


def test_pipo_options_change_the_verification():
    def verification(**options) -> tuple:
        plugin = pipo(made("grpo"), **({"window": 2} | options))
        batch = as_batch(SEQUENCES)
        state, found = plugin.init(), []
        for total in (3.0, 4.0, 2.0, 7.0):
            step = plugin.prepare(batch.with_scalars(sampled_reward_sum=total, sampled_count=7.0), state)
            state = step.state
            found.append(
                [
                    (u.learning_rate, u.moments, u.scale, u.batch.tokens["advantages"].tolist())
                    for u in step.updates[:-1]
                ]
            )
        return tuple(map(tuple, found))

    default = verification()
    for options in (
        {"window": 3},
        {"rectification": 0.5},
        {"learning_rate": 1e-3},
        {"xi_max": 0.5},
        {"optimizer_state": "own"},
    ):
        assert verification(**options) != default, options


@pytest.mark.parametrize("name", ["grpo", "gspo", "dapo", "cispo", "dr_grpo", "rloo"])
def test_a_kl_in_the_reward_keeps_its_coefficient(name, make_batch):
    """It is not divided by the deviation of the rewards: neither equal rewards nor their scale change its weight."""
    logprobs = {"old_logprobs": [-1.0, -2, -1, -1], "ref_logprobs": [-1.5, -1, -2, -1], "rollout_logprobs": [-1.0] * 4}
    equal, unequal = [make_batch([1] * 4, [0] * 4, [reward, 0, 0, 0], **logprobs) for reward in (0.0, 2.0)]
    options = {"kl_in": "reward"} | ({"filter_groups": False} if name == "dapo" else {})
    own = 4 / 3 if name == "rloo" else 1.0  # the mean of the others is the baseline
    centred = torch.tensor([0.5, -1, 1, 0]) - 0.125
    for coefficient in (1e-7, 1e-3, 1e-1):
        objective = made(name, kl_coefficient=coefficient, **options)
        penalty = own * coefficient * centred
        assert torch.allclose(objective.advantages(equal), -penalty, atol=1e-8)
        alone = made(name, kl_coefficient=0.0, **({"filter_groups": False} if name == "dapo" else {}))
        assert torch.allclose(objective.advantages(unequal), alone.advantages(unequal) - penalty, atol=1e-6)
        assert not objective.improvement_attributions(equal).any(), "PIPO verifies the reward alone"
