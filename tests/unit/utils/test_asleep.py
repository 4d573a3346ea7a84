"""The memory of an engine that sleeps in a rank, as the metrics count it."""

import torch

from megatron_rft.tracking.throughput import take_memory_peak
from megatron_rft.utils.asleep import Asleep


def test_the_peak_leaves_out_an_engine_that_slept_all_the_time(monkeypatch):
    """torch counts 70 GiB: 60 of the engine's. It falls asleep, sleeps while the trainer works, and wakes up."""
    free, sleeping = [10 << 30], Asleep()
    for name, value in (
        ("is_initialized", lambda: True),
        ("max_memory_allocated", lambda: 70 << 30),
        ("reset_peak_memory_stats", lambda: None),
        ("mem_get_info", lambda: (free[0], 80 << 30)),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr("megatron_rft.tracking.throughput.asleep", sleeping)
    peaks = []
    for freed in (60 << 30, 0, -(60 << 30), 0):
        with sleeping.changes():
            free[0] += freed
        peaks.append(take_memory_peak())
    assert peaks == [70, 10, 70, 70]
