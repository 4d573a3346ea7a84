"""The rank that is slower than the others; updates whose steps are skipped; means over a step's optimizer steps."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from megatron_rft.objectives.base import Update
from megatron_rft.records import Batch
from megatron_rft.tracking.observer import Trained
from megatron_rft.tracking.throughput import Phases
from megatron_rft.training import monitor
from megatron_rft.training.monitor import PHASES, STEPS, Mean, NonFiniteGuard, Stragglers
from megatron_rft.training.run import TrainingRun
from megatron_rft.utils.errors import RunFailed

BATCH = Batch.of([[1], [1]], [[2], [3]])


@pytest.fixture
def stragglers():
    return Stragglers(["n0", "n0", "n1", "n1"], Phases())


def rows(slow: int, seconds: float, phase: str = "generation") -> list[list[float]]:
    """Four ranks of one second of training each; `slow` has more in `phase`."""
    found = [[float(name == "training") for name in PHASES] for _ in range(4)]
    found[slow][PHASES.index(phase)] += seconds
    return found


def test_it_is_named_after_ten_steps_in_a_row(stragglers):
    told = [stragglers.compare(rows(2, 0.5), step)[1] for step in range(1, 25)]
    assert [step for step, each in enumerate(told, start=1) if each] == [STEPS]
    assert "rank 2 on node n1 has been the slowest for 10 steps: it worked 1.50 s" in told[STEPS - 1]
    assert "the median rank 1.00 s; most of the difference is in generation" in told[STEPS - 1]


def test_not_for_a_tenth_nor_where_they_change(stragglers):
    assert not any(stragglers.compare(rows(2, 0.1), step)[1] for step in range(30))
    assert not any(stragglers.compare(rows(step % 4, 0.5), step)[1] for step in range(30))


def test_metrics(stragglers):
    found = stragglers.compare(rows(3, 0.5, "training"), 1)[0]
    assert (found["ranks/slowest"], found["ranks/work_slowest"], found["ranks/work_median"]) == (3, 1.5, 1.0)
    assert found["ranks/training_slowest"] == 1.5 and "ranks/generation_slowest" not in found


def steps_of(guard: NonFiniteGuard, *names: str) -> None:
    """Optimizer steps of updates; those with a capital letter are skipped."""
    for name in names:
        metrics = {"skipped": float(name[0].isupper()), "loss": 0.0, "grad_norm": 0.0}
        guard.trained(Trained(1, name.lower(), BATCH, BATCH, metrics))


def test_a_policy_whose_steps_are_all_skipped_ends_the_run_whatever_its_critic_does(tmp_path, monkeypatch):
    monkeypatch.setattr(monitor.dist, "get_rank", lambda: 1)
    guard = NonFiniteGuard(tmp_path, bound=2)
    steps_of(guard, "value", "Policy", "value", "Policy", "value", "policy", "Value", "policy", "value")
    assert guard.skipped == (0, 3)
    steps_of(guard, "value", "Policy", "value", "Policy", "value")
    with pytest.raises(RunFailed, match="not finite 3 times in a row"):
        steps_of(guard, "Policy")


def test_norms_of_the_parts_are_means_over_the_optimizer_steps():
    norms, mean = iter([{"constraint/grad_norm_base": 1.0}, {"constraint/grad_norm_base": 4.0}]), Mean()
    models = SimpleNamespace(
        skips_zero_advantages=False,
        norms_every=1,
        second=lambda update, batch: None,
        part_norms=lambda *_: next(norms),
        step=lambda *_: {"loss": 2.0},
    )
    run = SimpleNamespace(models=models, phases=lambda name: nullcontext(), observers=[mean])
    update = Update("policy", BATCH, None, parts={"constraint/grad_norm_base": None})
    for _ in range(2):
        TrainingRun.optimizer_step(run, update, BATCH, 1)
    metrics = {}
    mean.end_of_step(1, metrics)
    assert metrics == {"constraint/grad_norm_base": 2.5, "policy/loss": 2.0}
