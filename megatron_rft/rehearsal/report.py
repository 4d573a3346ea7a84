"""Writes the counts of rehearsed ranks as text, and adds them up to a step. No torch."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from megatron_rft.plan.devices import GIB
from megatron_rft.rehearsal.ledger import BETWEEN, NOT_TIMED, RECURRING

SMALL = GIB // 100  # smaller categories are added up as "rest"
SMALL_MESSAGE = 1 << 20  # bytes; collectives with a smaller total are not shown


@dataclass(frozen=True)
class Stage:
    """A kind of rank, and the counts of its rehearsal (rank.answer)."""

    number: int  # of the pipeline stage, from 0
    stages: int
    virtual: int
    rank: int
    found: dict[str, Any]

    @property
    def name(self) -> str:
        return f"stage {self.number + 1} of {self.stages}" if self.stages > 1 else "every rank"

    @property
    def phases(self) -> list[str]:
        return [phase for phase in self.found["peaks"] if phase not in (BETWEEN, "start")]

    def rows(self, phase: str, what: str) -> Iterable[list]:
        """Return a phase's rows of "kernels", "links" or "waits"."""
        return (row for row in self.found[what] if row[0] == phase)

    def times(self, phase: str) -> tuple[float, float]:
        """Return (passes in a step, micro-batches of a pass in the run / micro-batches rehearsed)."""
        return tuple(self.found["times"].get(phase, (1, 1)))

    def seconds(self, phase: str, what: str) -> float:
        """Return the seconds of all passes of a step: kernels or links one after the other, with the pipeline's
        bubble."""
        passes, ratio = self.times(phase)
        micro_batches = max(1.0, self.found["micro_batches"].get(phase, 1) * ratio)
        bubble = 1 + (self.stages - 1) / self.virtual / micro_batches
        parts: Counter[str] = Counter()
        for row in self.rows(phase, what):
            parts[row[1]] += row[-1]
        recurring = sum(parts[part] for part in RECURRING)
        return passes * (recurring * ratio * bubble + sum(parts.values()) - recurring)


def bounds(stages: list[Stage]) -> dict[str, tuple[float, float]]:
    """Return the seconds of each phase on the slowest stage: (with links hidden behind kernels, without overlap)."""
    by_phase = {}
    for phase in (phase for phase in stages[0].phases if phase not in NOT_TIMED):
        pairs = [(s.seconds(phase, "kernels"), s.seconds(phase, "links")) for s in stages]
        by_phase[phase] = max(max(pair) for pair in pairs), max(sum(pair) for pair in pairs)
    return by_phase


def peak(stages: list[Stage]) -> tuple[Stage, str, int, dict[str, int]]:
    """Return the peak of memory of all stages: (stage, phase, bytes, bytes by category)."""
    every = [(s.found["peaks"][phase]["total"], i, phase) for i, s in enumerate(stages) for phase in s.phases]
    total, i, phase = max(every)
    return stages[i], phase, total, stages[i].found["peaks"][phase]["parts"]


def gib(size: float) -> str:
    return f"{size / GIB:.2f}"


def lines(stages: list[Stage], beside: int) -> list[str]:
    """`beside`: bytes of engines on the same device, by the plan's arithmetic."""
    return [*memory_lines(stages, beside), *time_lines(stages), *link_lines(stages)]


def categories(parts: dict[str, int]) -> str:
    large = {name: size for name, size in parts.items() if size >= SMALL and name != "rest"}
    rest = sum(parts.values()) - sum(large.values())
    named = [f"{name} {gib(size)}" for name, size in sorted(large.items(), key=lambda each: -each[1])]
    return ", ".join(named + ([f"rest {gib(rest)}"] if rest >= SMALL or not named else []))


def memory_lines(stages: list[Stage], beside: int) -> list[str]:
    told = ["peak of memory by phase, GiB" + (f" (and {gib(beside)} of engines beside it)" if beside else "") + ":"]
    for stage in stages:
        for phase in stage.phases:
            entry = stage.found["peaks"][phase]
            told.append(f"  {stage.name}, {phase}: {gib(entry['total'])} = {categories(entry['parts'])}")
        if uploads := stage.found["uploads"].get("loading"):
            count, size = uploads
            held = gib(stage.found["host"]["loading"])
            told.append(
                f"  {stage.name}, loading: {count:,} copies to the device, {gib(size)} GiB; up to {held} GiB of the "
                "host's memory"
            )
        host, phase = max(((size, phase) for phase, size in stage.found["host"].items()), default=(0, ""))
        if host >= SMALL:
            told.append(f"  {stage.name}, in the host's memory: {gib(host)} in {phase}")
    return told


def time_lines(stages: list[Stage]) -> list[str]:
    told = ["seconds of a step by phase, from all links behind kernels to no overlap at all:"]
    by_phase = bounds(stages)
    for phase, (least, most) in by_phase.items():
        passes, ratio = stages[0].times(phase)
        count = stages[0].found["micro_batches"].get(phase, 0) * ratio
        how = f" ({passes:g} x {count:.0f} micro-batches of each rank)" if count else ""
        told.append(f"  {phase}: {seconds(least)} to {seconds(most)}{how}")
    least, most = (sum(pair[i] for pair in by_phase.values()) for i in (0, 1))
    return [*told, f"  together: {seconds(least)} to {seconds(most)}, without generation, grading and checkpoints"]


def seconds(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def link_lines(stages: list[Stage]) -> list[str]:
    """Return lines about the collectives of one rehearsed pass of each phase, by group."""
    told = ["collectives of one rehearsed pass, by group:"]
    for stage in stages:
        totals: dict[tuple, list[float]] = defaultdict(lambda: [0, 0])
        for phase in stage.phases:
            for _, _, name, group, ranks, span, calls, size, _ in stage.rows(phase, "links"):
                entry = totals[phase, group, ranks, span, name]
                entry[0], entry[1] = entry[0] + calls, entry[1] + size
        for (phase, group, ranks, span, name), (calls, size) in totals.items():
            if size < SMALL_MESSAGE:
                continue
            where = "inside a node" if span == "node" else "across nodes"
            each = f"{calls:,} x {name}, {gib(size)} GiB"
            told.append(f"  {stage.name}, {phase}, {group} ({ranks} ranks {where}): {each}")
    return told if len(told) > 1 else []
