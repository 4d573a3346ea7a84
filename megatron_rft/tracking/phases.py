"""Measures the seconds and the peak memory of each phase of a step."""

import resource
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from megatron_rft.utils.position import here


class Phases:
    """Measures seconds and peak memory by phase. Every second counts once: the time of an inner phase is not counted in
    the outer one.

        phases = Phases()
        with phases("generation"):
            ...
        metrics |= phases.take()  # {"seconds/generation": 1.2, "memory/generation_gib": 3.4, "seconds/step": 1.3, ...}

    GPU kernels run asynchronously, so the end of a phase waits for the device.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._seconds: dict[str, float] = defaultdict(float)
        self._peaks: dict[str, float] = defaultdict(float)
        self._waited: dict[str, float] = defaultdict(float)  # of the seconds: for collectives
        self._waited_before = here.waited_s
        self._open = ["other"]
        take_memory_peak()
        self._mark = clock()

    def _attribute(self) -> None:
        """Add the time since the last call to the innermost open phase."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        now, phase = self._clock(), self._open[-1]
        self._seconds[phase] += now - self._mark
        self._waited[phase] += here.waited_s - self._waited_before
        self._waited_before = here.waited_s
        self._peaks[phase] = max(self._peaks[phase], take_memory_peak())
        self._mark = now

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._attribute()
        self._open.append(name)
        here.enter(name)
        try:
            yield
        finally:
            self._attribute()
            self._open.pop()
            here.enter(self._open[-1])

    def work(self) -> dict[str, float]:
        """The seconds by phase that were not spent waiting for other ranks, since the last `take`. Call it before."""
        self._attribute()
        return {phase: max(seconds - self._waited[phase], 0.0) for phase, seconds in self._seconds.items()}

    def take(self) -> dict[str, float]:
        """Return seconds and peak memory since the last call, by phase and in total, and reset them."""
        self._attribute()
        seconds, self._seconds = self._seconds, defaultdict(float)
        self._waited.clear()
        peaks, self._peaks = self._peaks, defaultdict(float)
        metrics = {f"seconds/{name}": value for name, value in seconds.items()}
        metrics |= {f"memory/{name}_gib": value for name, value in peaks.items()}
        return metrics | {"seconds/step": sum(seconds.values()), "memory/peak_gib": max(peaks.values())}


def take_memory_peak() -> float:
    """Return the peak memory in GiB since the last call: torch's allocations on a GPU, else this process's resident
    set. Where Linux does not let a process reset its peak, it is the largest ever."""
    if torch.cuda.is_initialized():
        peak = torch.cuda.max_memory_allocated() / 2**30
        torch.cuda.reset_peak_memory_stats()
        return peak
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB
    try:
        with open("/proc/self/status") as status:
            peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 2**20
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # resets VmHWM
    except (OSError, StopIteration):
        pass
    return peak
