"""Distillation against a loop in NumPy: what the loss is, which tokens count, and the plug-in around another loss."""

import numpy as np
import pytest
import torch

from megatron_rft.objectives.base import SecondDistribution, counts
from megatron_rft.records import Batch
from megatron_rft.utils.errors import ConfigError
from tests.made import distilled, made, pipo

VOCABULARY, TEMPERATURE = 5, 0.8


def sampled() -> Batch:
    """Three responses; the second token of the last was written by an environment."""
    mask = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 1.0])
    tokens = {name: torch.full((6,), -1.0) for name in ("old_logprobs", "rollout_logprobs", "ref_logprobs")}
    batch = Batch.of([[1], [1], [2]], [[3, 4], [2], [1, 0, 3]], tokens=tokens | {"response_mask": mask})
    sequences = {"group": torch.tensor([0, 0, 1]), "rewards": torch.tensor([0.0, 1.0, 0.5])}
    return batch.with_sequences(**sequences).with_scalars(sampled_reward_sum=1.5, sampled_count=3.0)


def logits() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(1)
    return generator.normal(size=(6, VOCABULARY)), generator.normal(size=(6, VOCABULARY))


def probabilities(row: np.ndarray) -> np.ndarray:
    found = np.exp(row / TEMPERATURE - (row / TEMPERATURE).max())
    return found / found.sum()


def divergence(kind: str, beta: float, student: np.ndarray, teacher: np.ndarray) -> float:
    """Of one token."""
    total = 0.0
    for s, t in zip(student, teacher, strict=True):
        m = beta * t + (1 - beta) * s
        total += {
            "reverse_kl": s * np.log(s / t),
            "forward_kl": t * np.log(t / s),
            "jsd": beta * t * np.log(t / m) + (1 - beta) * s * np.log(s / m),
        }[kind]
    return total


def outputs(batch: Batch, kind: str, beta: float) -> dict[str, torch.Tensor]:
    """The outputs of the model for `logits`, one token at a time."""
    students, teachers = (np.stack([probabilities(row) for row in rows]) for rows in logits())
    chosen = batch.response_ids.tolist()
    found = {
        kind: [divergence(kind, beta, s, t) for s, t in zip(students, teachers, strict=True)],
        "logprobs": [np.log(row[token]) for row, token in zip(students, chosen, strict=True)],
        "other_logprobs": [np.log(row[token]) for row, token in zip(teachers, chosen, strict=True)],
        "entropy": [-(row * np.log(row)).sum() for row in students],
    }
    return {name: torch.tensor(values) for name, values in found.items()}


def loop(batch: Batch, kind: str, beta: float) -> float:
    """The mean of the divergence over the tokens that the student wrote."""
    total, count = 0.0, 0
    for mask, s, t in zip(batch.response_mask.tolist(), *logits(), strict=True):
        if mask:
            total, count = total + divergence(kind, beta, probabilities(s), probabilities(t)), count + 1
    return total / count


@pytest.mark.parametrize("name", ["distil", "offline_distil"])
@pytest.mark.parametrize("kind, beta", [("reverse_kl", 0.5), ("forward_kl", 0.5), ("jsd", 0.5), ("jsd", 0.2)])
def test_the_loss_is_that_of_the_loop(name, kind, beta):
    options = {"divergence": kind} | ({"jsd_beta": beta} if kind == "jsd" else {})
    (update,) = made(name, **options).prepare(sampled(), {}).updates
    assert update.second == SecondDistribution("distil", mixture=beta) and kind in update.outputs
    (step,) = update.steps()
    loss = update.loss(outputs(step, kind, beta), step)
    assert loss.mean(update.counts(step)).item() == pytest.approx(loop(step, kind, beta), rel=1e-6)
    assert loss.logged(update.counts(step))["teacher_advantage"] != 0


def test_the_plugin_adds_it_to_the_loss_of_the_base():
    base = made("grpo", kl_coefficient=0.0)
    plugin = distilled(base, divergence="jsd", coefficient=0.3)
    (alone,), (update,) = (each.prepare(sampled(), {}).updates for each in (base, plugin))
    (plain,), (step,) = alone.steps(), update.steps()
    assert "no_gradient" in plain.sequences and "no_gradient" not in step.sequences
    found = outputs(step, "jsd", 0.5)
    expected = alone.loss(found, plain).mean(counts(plain)) + 0.3 * loop(step, "jsd", 0.5)
    assert update.loss(found, step).mean(counts(step)).item() == pytest.approx(expected.item(), rel=1e-6)
    assert plugin.needs == base.needs and update.outputs == alone.outputs | {"jsd", "logprobs", "other_logprobs"}


def test_a_loss_that_compares_already_is_refused():
    with pytest.raises(ConfigError, match="^distil: the loss of this algorithm compares with another"):
        distilled(made("grpo", kl_estimator="exact")).prepare(sampled(), {})


def test_the_verification_of_pipo_stays_that_of_the_base():
    whole, plain = (pipo(each, window=2) for each in (distilled(made("grpo")), made("grpo")))
    states = whole.init(), plain.init()
    for number in range(4):
        batch = sampled().with_scalars(sampled_reward_sum=1.0 + number**2, sampled_count=3.0)
        found = [each.prepare(batch, state) for each, state in zip((whole, plain), states, strict=True)]
        states = [each.state for each in found]
    ours, theirs = (each.updates[0] for each in found)
    assert ours.name == theirs.name == "verification" and ours.second is None and ours.scale == theirs.scale
