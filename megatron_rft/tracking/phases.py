"""Where a step's seconds and memory go."""

import resource
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class Phases:
    """Seconds by phase. Every second counts once: a phase inside another takes its time away from the outer one.

        phases = Phases()
        with phases("generation"):
            ...
        metrics |= phases.take()      # {"seconds/generation": 1.2, "seconds/other": 0.1, "seconds/step": 1.3, ...}

    Kernels run behind the host's back, so that a phase ends when the device is done with it.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._seconds: dict[str, float] = defaultdict(float)
        self._open = ["other"]
        self._mark = clock()

    def _attribute(self) -> None:
        """What passed since the last call belongs to the innermost open phase."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        now = self._clock()
        self._seconds[self._open[-1]] += now - self._mark
        self._mark = now

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._attribute()
        self._open.append(name)
        try:
            yield
        finally:
            self._attribute()
            self._open.pop()

    def take(self) -> dict[str, float]:
        """The seconds since the last call, by phase and in all, and the memory's peak. Counting starts afresh."""
        self._attribute()
        seconds, self._seconds = self._seconds, defaultdict(float)
        metrics = {f"seconds/{name}": value for name, value in seconds.items()}
        return metrics | {"seconds/step": sum(seconds.values()), "memory/peak_gib": take_memory_peak()}


def take_memory_peak() -> float:
    """GiB. On a GPU what torch allocated at most since the last call; else this process's largest ever resident set."""
    if not torch.cuda.is_initialized():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB
    peak = torch.cuda.max_memory_allocated() / 2**30
    torch.cuda.reset_peak_memory_stats()
    return peak
