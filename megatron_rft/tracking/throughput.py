"""Measures tokens per second and per device, and model FLOPs utilisation (MFU).

Model FLOPs as in arXiv:2204.02311, appendix B: a token of a sequence of length l costs 2 N in the matrices (N: the
parameters that multiply it, so the experts it is routed to and the output matrix, but not the embedding), and 2 L q l
in causal attention (L layers, q = heads x head size, on average l / 2 keys); backward costs twice as much. Activation
recomputation and forward passes without a backward pass are not counted.
"""

import resource
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_rft.plan.devices import DEVICES
from megatron_rft.plan.model_shape import ModelShape
from megatron_rft.tracking.observer import Observer, Trained
from megatron_rft.utils.asleep import asleep
from megatron_rft.utils.device import return_free_pages
from megatron_rft.utils.position import here


class Phases(Observer):
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

    def end_of_step(self, step: int, metrics: dict[str, float]) -> None:
        metrics |= self.take()

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
    """Return the peak memory in GiB since the last call: torch's allocations on a GPU, without those of an engine that
    slept all the time, else this process's resident set. Where Linux does not let a process reset its peak, it is the
    largest ever."""
    if torch.cuda.is_initialized():
        peak = (torch.cuda.max_memory_allocated() - asleep.take()) / 2**30
        torch.cuda.reset_peak_memory_stats()
        return peak
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 2**20
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    return peak


class FreePages(Observer):
    """Gives free pages back, at most every ten seconds: the next step takes them again, half a second a GiB."""

    due = 0.0

    def end_of_step(self, step: int, metrics: dict[str, float]) -> None:
        if (now := time.monotonic()) >= self.due:
            return_free_pages()
            self.due = now + 10


# In dense bf16, by a part of CUDA's device name; from NVIDIA's data sheets
PEAK_TFLOPS = {device.name: device.flops / 1e12 for device in DEVICES.values()}
PEAK_TFLOPS |= {"GB200": 2500.0, "GH200": 989.4, "H100 PCIe": 756.0, "H100 NVL": 835.0, "H800": 989.4, "L40S": 362.0}
PEAK_TFLOPS["A800"] = PEAK_TFLOPS["A100"]


def peak_tflops() -> float | None:
    """Return the peak of this process's device; None if it is unknown (tracking.peak_tflops)."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return PEAK_TFLOPS.get(max((name for name in PEAK_TFLOPS if name in device), key=len, default=""))


@dataclass
class Throughput(Observer):
    """Counts the tokens and FLOPs of a training step's optimizer steps. `peak`: TFLOP/s of one device, or None. A
    shared prompt counts once, also if its group was split over ranks."""

    sizes: ModelShape
    devices: int
    peak: float | None
    share_prompts: bool = False
    tokens: float = 0.0
    flops: float = 0.0

    def trained(self, step: Trained) -> None:
        batch, _ = step.computed.by_segment()
        prompts, lengths = batch.prompt_lens.double(), batch.lengths.double()
        self.tokens += lengths.sum().item()
        again = torch.zeros(len(batch), dtype=torch.bool)  # whether an earlier sequence has computed the prompt
        if self.share_prompts:
            numbers = batch.prompt_numbers
            again[1:] = numbers[1:] <= numbers.cummax(0).values[:-1]
        computed = (lengths.sum() - prompts[again].sum()).item()
        pairs = (lengths.square().sum() - prompts[again].square().sum()).item()
        self.flops += 3 * (2 * self.sizes.multiplied * computed + 2 * len(self.sizes.mixture) * self.sizes.q * pairs)

    def end_of_step(self, step: int, metrics: dict[str, float]) -> None:
        """Add the rates of the step whose seconds are in `metrics`, and reset the counts."""
        if "tokens/generated" in metrics:
            metrics["tokens/per_second"] = metrics["tokens/generated"] / metrics["seconds/step"]
            metrics["tokens/per_second_per_device"] = metrics["tokens/per_second"] / self.devices
        seconds = metrics.get("seconds/training", 0.0) + metrics.get("seconds/verification", 0.0)
        if seconds and self.tokens:
            metrics["tokens/trained_per_second_per_device"] = self.tokens / seconds / self.devices
            if self.peak:
                metrics["training/mfu"] = self.flops / (seconds * self.devices * self.peak * 1e12)
        self.tokens = self.flops = 0.0
