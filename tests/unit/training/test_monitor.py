"""The rank that is slower than the others."""

import pytest

from megatron_rft.tracking.throughput import Phases
from megatron_rft.training.monitor import PHASES, STEPS, Stragglers


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
