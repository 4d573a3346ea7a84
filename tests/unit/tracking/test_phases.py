import itertools
import re
from pathlib import Path

import pytest

from megatron_rft.tracking.phases import Phases


def test_every_second_counts_once_and_inner_phases_take_theirs():
    """A clock that ticks once per reading: 0 at the start, then at every boundary."""
    ticks = itertools.count()
    phases = Phases(clock=lambda: next(ticks))
    with phases("generation"), phases("reward"):  # boundaries at 1 and 2
        pass  # and at 3 and 4
    metrics = phases.take()  # boundary at 5
    assert metrics["seconds/generation"] == 2 and metrics["seconds/reward"] == 1 and metrics["seconds/other"] == 2
    assert metrics["seconds/step"] == 5
    assert phases.take()["seconds/step"] == 1


def test_a_phase_that_fails_is_closed():
    ticks = itertools.count()
    phases = Phases(clock=lambda: next(ticks))
    try:
        with phases("training"):
            raise ValueError
    except ValueError:
        pass
    assert phases.take() | {"memory/peak_gib": 0} == {
        "seconds/other": 2,
        "seconds/training": 1,
        "seconds/step": 3,
        "memory/peak_gib": 0,
    }


def test_memory_peak_is_what_the_kernel_says():
    status = Path("/proc/self/status").read_text()
    kib = int(re.search(r"VmHWM:\s+(\d+) kB", status).group(1))
    assert Phases().take()["memory/peak_gib"] == pytest.approx(kib / 2**20, rel=0.05)
