"""Where a step's seconds and memory go."""

import resource
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class Phases:
    """Seconds and peaks of memory by phase. Every second counts once: a phase inside another takes its time away from
    the outer one.

        phases = Phases()
        with phases("generation"):
            ...
        metrics |= phases.take()  # {"seconds/generation": 1.2, "memory/generation_gib": 3.4, "seconds/step": 1.3, ...}

    Kernels run behind the host's back, so that a phase ends when the device is done with it.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._seconds: dict[str, float] = defaultdict(float)
        self._peaks: dict[str, float] = defaultdict(float)
        self._open = ["other"]
        take_memory_peak()
        self._mark = clock()

    def _attribute(self) -> None:
        """Add the time since the last call to the innermost open phase."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        now, phase = self._clock(), self._open[-1]
        self._seconds[phase] += now - self._mark
        self._peaks[phase] = max(self._peaks[phase], take_memory_peak())
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
        """The seconds since the last call and the peaks of memory, by phase and in all. Counting starts afresh."""
        self._attribute()
        seconds, self._seconds = self._seconds, defaultdict(float)
        peaks, self._peaks = self._peaks, defaultdict(float)
        metrics = {f"seconds/{name}": value for name, value in seconds.items()}
        metrics |= {f"memory/{name}_gib": value for name, value in peaks.items()}
        return metrics | {"seconds/step": sum(seconds.values()), "memory/peak_gib": max(peaks.values())}


def take_memory_peak() -> float:
    """GiB, the most since the last call: on a GPU what torch allocated, else this process's resident set (where Linux
    does not let a process forget its peak, the largest ever)."""
    if torch.cuda.is_initialized():
        peak = torch.cuda.max_memory_allocated() / 2**30
        torch.cuda.reset_peak_memory_stats()
        return peak
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB
    try:
        with open("/proc/self/status") as status:
            peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 2**20
        with open("/proc/self/clear_refs", "w") as forget:
            forget.write("5")
    except (OSError, StopIteration):
        pass
    return peak
