import itertools
import mmap

import pytest

from megatron_rft.tracking.throughput import Phases


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
    seconds = {name: value for name, value in phases.take().items() if name.startswith("seconds/")}
    assert seconds == {"seconds/other": 2, "seconds/training": 1, "seconds/step": 3}


def test_memory_belongs_to_the_phase_that_took_it():
    phases = Phases()
    # not by torch, whose memory may stay in the process for the next tensor
    with phases("generation"), mmap.mmap(-1, 256 << 20) as block:
        block[:: mmap.PAGESIZE] = bytes(len(block) // mmap.PAGESIZE)
    with phases("training"):
        pass
    found = phases.take()
    if found["memory/generation_gib"] <= phases.take()["memory/other_gib"]:
        pytest.skip("this system does not let a process forget its peak")
    assert found["memory/generation_gib"] > found["memory/training_gib"] + 0.2
    assert found["memory/peak_gib"] == max(value for name, value in found.items() if name.startswith("memory/"))
