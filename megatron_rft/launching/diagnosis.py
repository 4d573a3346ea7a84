"""Which rank keeps a run from moving, from where each rank is. Pure functions over `RankState`."""

from collections import Counter
from dataclasses import dataclass

from megatron_rft.utils.position import Position, members

STOPPED_STATES = "Tt"  # of /proc/PID/stat: by a signal, by a debugger


@dataclass(frozen=True)
class RankState(Position):
    """A rank as its launcher sees it. `still_s`: seconds since it moved. `state`: its process's letter of
    /proc/PID/stat. `stopped`: stopped processes that it started."""

    host: str = ""
    node: int = 0
    state: str = "S"
    still_s: float = 0.0
    stopped: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        part = f", micro-batch {self.micro_batch}" if self.micro_batch else ""
        return f"step {self.step}, {self.phase}{part}"

    @property
    def collective(self) -> str:
        if self.last not in self.groups:
            return "no collective yet"
        ranks, operation, number = self.groups[self.last]
        return f"{operation} no. {number} of group {self.last} (ranks {ranks})"


@dataclass(frozen=True)
class Diagnosis:
    guilty: tuple[RankState, ...]
    sentence: str


def missing(states: list[RankState]) -> dict[int, dict[int, str]]:
    """Return {rank: {rank that it waits for: the collective}}. A rank waits for the members of a group that have begun
    fewer of the group's operations."""
    known = {state.rank: state for state in states}
    waits: dict[int, dict[int, str]] = {}
    for state in states:
        for name, (ranks, operation, number) in state.groups.items():
            if operation == "send":  # a message that is buffered; the receiver may come later
                continue
            for other in members(ranks):
                peer = known.get(other)
                if peer is not None and peer.groups.get(name, ("", "", 0))[2] < number:
                    waits.setdefault(state.rank, {})[other] = f"{operation} no. {number} of group {name}"
    return waits


def diagnose(states: list[RankState]) -> Diagnosis:
    """Name the rank that keeps the run from moving. Looks in this order for a stopped process; a rank that others
    wait for and that waits for nobody; ranks in different collectives; the only rank; ranks that do not wait."""
    by_stop = [s for s in states if s.state in STOPPED_STATES] or [s for s in states if s.stopped]
    if by_stop:
        waits = f"waits for a process of its own that is stopped ({', '.join(by_stop[0].stopped)})"
        return _named(by_stop, "is stopped" if by_stop[0].state in STOPPED_STATES else waits)
    waits = missing(states)
    late = {other: what for some in waits.values() for other, what in some.items()}
    by_late = [s for s in states if s.rank in late and not s.waiting]
    if by_late:
        return _named(by_late, f"has not come to {late[by_late[0].rank]}")
    if disagreeing := _disagreeing(states, waits):
        return _disagreement(states, disagreeing)
    if len(states) == 1:
        return _named(states, "does not move")
    by_work = [s for s in states if not s.waiting]
    if by_work and len(by_work) < len(states):
        return _named(by_work, "does not come to the next collective")
    return Diagnosis(tuple(states), f"no rank has moved, and none is alone in it: {_place(states[0])}")


def _disagreeing(states: list[RankState], waits: dict[int, dict[int, str]]) -> list[RankState]:
    """Of the ranks that wait for each other, return those in the collective that the fewest ranks are in."""
    circle = [s for s in states if s.rank in waits and any(s.rank in some for some in waits.values())]
    for state in states if not circle else []:  # the same number of another operation
        if state.last in state.groups:
            ranks, operation, number = state.groups[state.last]
            peers = [s for s in states if s.rank in members(ranks) and state.last in s.groups]
            if any(s.groups[state.last][1:] != (operation, number) for s in peers):
                circle.append(state)
    counts = Counter(_kind(state) for state in states)
    fewest = min((counts[_kind(state)] for state in circle), default=0)
    return [state for state in circle if counts[_kind(state)] == fewest]


def _kind(state: RankState) -> tuple:
    """Return what ranks at the same place of the program have in common: a group's label, not its number."""
    label = state.last.partition(" ")[2]
    return state.step, state.phase, label, state.groups.get(state.last, ("", "", 0))[1]


def _disagreement(states: list[RankState], disagreeing: list[RankState]) -> Diagnosis:
    """Name both ranks, or both halves, of a disagreement: nothing tells which one is wrong."""
    theirs = {rank for s in disagreeing if s.last in s.groups for rank in members(s.groups[s.last][0])}
    others = [state for state in states if state not in disagreeing and state.rank in theirs]
    if not others:
        told = "; ".join(f"rank {s.rank} on node {s.host} in {s.collective} ({_place(s)})" for s in disagreeing)
        return Diagnosis(tuple(disagreeing), f"these ranks wait for each other in different collectives: {told}")
    told = "; ".join(f"rank {s.rank} in {s.collective}" for s in (disagreeing[0], others[0]))
    return _named(disagreeing, f"is in another collective than its group: {told}")


def _place(state: RankState) -> str:
    return f"{state.where}, for {state.still_s:.0f} s"


def _named(guilty: list[RankState], what: str) -> Diagnosis:
    first, more = guilty[0], guilty[1:]
    also = f" (and so {'are' if len(more) > 1 else 'is'} {', '.join(f'rank {s.rank}' for s in more)})" if more else ""
    told = f"rank {first.rank} on node {first.host} {what}{also}; it is in {_place(first)}"
    return Diagnosis(tuple(guilty), told)


def describe(states: list[RankState]) -> list[str]:
    """Return a line for each rank: where it is, and whom it waits for."""
    waits, lines = missing(states), []
    for s in sorted(states, key=lambda state: state.rank):
        doing = "waits in" if s.waiting else "stopped after" if s.state in STOPPED_STATES else "works; last was"
        doing += f" {s.collective}"
        lines.append(f"rank {s.rank} (node {s.host}, pid {s.pid}): {s.where}, {s.still_s:.0f} s; {doing}")
        lines += [f"    {what}: rank {other} has not come" for other, what in sorted(waits.get(s.rank, {}).items())]
    return lines
