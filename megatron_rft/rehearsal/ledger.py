"""Counts what a rehearsed rank does: memory by phase and category, kernels, collectives, waits of the host.

A step has phases (policy log-probs, training ...), and a phase has parts: "forward" and "backward" of micro-batches,
"pipeline" messages between them, the gradients' "reduce", the "optimizer", and the "rest". The first three recur with
every micro-batch.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from megatron_rft.plan.devices import NODE, Device, Efficiency

PACKAGE = Path(__file__).resolve().parents[1]
BETWEEN = "between"
NOT_TIMED = (BETWEEN, "start", "loading", "generation")  # phases outside of a step's seconds
RECURRING = ("forward", "backward", "pipeline")
BLOCK = 512  # bytes; sizes of torch's allocator are multiples of it


class Memory:
    """Bytes of live tensors on a device by category, and their peak in each phase of the ledger."""

    def __init__(self, ledger: "Ledger") -> None:
        self.ledger = ledger
        self.alive: Counter[str] = Counter()
        self.total = 0
        self.peaks: dict[str, tuple[int, dict[str, int]]] = {}

    def add(self, category: str, size: int) -> None:
        self.alive[category] += size
        self.total += size
        phase = self.ledger.phase
        if self.total > self.peaks.get(phase, (-1,))[0]:
            self.peaks[phase] = self.total, dict(self.alive)

    def move(self, before: str, after: str, size: int) -> None:
        self.alive[before] -= size
        self.alive[after] += size


class Ledger:
    def __init__(self, device: Device, efficiency: Efficiency, node: int = NODE):
        self.device, self.efficiency, self.node = device, efficiency, node
        self.memory, self.host = Memory(self), Memory(self)
        self.phase, self.part, self.category = BETWEEN, "rest", None
        self.training = False  # whether the micro-batches have a backward pass
        self.in_backward = lambda: False  # set by the device mode, which knows autograd
        self.kernels: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0, 0.0, 0.0])
        self.links: dict[tuple, list[float]] = defaultdict(lambda: [0, 0, 0.0])
        self.waits: Counter[tuple[str, str, str, str]] = Counter()
        self.uploads: dict[str, list[int]] = defaultdict(lambda: [0, 0])  # phase -> copies from the host, their bytes
        self.micro_batches: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.largest: Counter[str] = Counter()  # tokens of the largest micro-batch of each phase

    # ---- phases and parts

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        with self._now("phase", phase):
            for memory in (self.memory, self.host):
                memory.add("", 0)  # what is there is the phase's first peak
            yield

    def doing(self, part: str) -> AbstractContextManager[None]:
        return self._now("part", part)

    def holding(self, category: str) -> AbstractContextManager[None]:
        """Count tensors that are created in this context under this category."""
        return self._now("category", category)

    @contextmanager
    def _now(self, name: str, value: str) -> Iterator[None]:
        before = getattr(self, name)
        setattr(self, name, value)
        try:
            yield
        finally:
            setattr(self, name, before)

    def category_now(self) -> str:
        if self.category is not None:
            return self.category
        if self.in_backward():
            return "backward"
        if self.part == "forward":
            return "activations" if self.training else "forward without gradient"
        return "optimizer step" if self.part == "optimizer" else "rest"

    # ---- events

    def kernel(self, flops: float, moved: float) -> None:
        """Count a kernel. By a roofline it takes the longer of its arithmetic and its memory traffic."""
        e, d = self.efficiency, self.device
        entry = self.kernels[self.phase, self.part]
        seconds = max(flops / d.flops / e.compute, moved / d.bandwidth / e.memory, e.launch)
        for i, value in enumerate((1, flops, moved, seconds)):
            entry[i] += value

    def collective(self, name: str, group: str, ranks: list[int], size: int) -> None:
        if len(ranks) < 2:
            return
        part = self.part
        if name in ("send", "recv"):
            part = "pipeline"
        elif "data" in group:
            part = "reduce"
        span = "node" if len({rank // self.node for rank in ranks}) == 1 else "network"
        entry = self.links[self.phase, part, name, group, len(ranks), span]
        for i, value in enumerate((1, size, self.link_seconds(name, ranks, size))):
            entry[i] += value

    def link_seconds(self, name: str, ranks: list[int], size: int) -> float:
        """Return the seconds of a ring over the slowest link: it carries (n-1)/n of the whole, and twice that for an
        all-reduce. Ranks of one node share its ports."""
        together = Counter(rank // self.node for rank in ranks)
        inside, d = len(together) == 1, self.device
        rate = d.nvlink if inside else min(d.nvlink, d.network * min(together.values()))
        share = 1.0 if name in ("send", "recv") else (len(ranks) - 1) / len(ranks)
        twice = 2 if name == "allreduce" else 1
        return size * share * twice / rate / self.efficiency.link + self.efficiency.latency

    def upload(self, size: int) -> None:
        entry = self.uploads[self.phase]
        entry[0], entry[1] = entry[0] + 1, entry[1] + size

    def temporary(self, size: int) -> None:
        """Count host memory that is freed at once."""
        for change in (size, -size):
            self.host.add(self.category_now(), change)

    def wait(self, what: str) -> None:
        """Count a wait of the host for the device or for another host, by the source line that waits."""
        self.waits[self.phase, self.part, what, _line()] += 1


def _line() -> str:
    """Return the innermost source line outside of this package and of torch, as file:number."""
    frame = sys._getframe(2)
    while frame:
        name = Path(frame.f_code.co_filename)
        if "megatron" in str(name) and name.parent != PACKAGE / "rehearsal":
            return f"{'/'.join(name.parts[-2:])}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"
