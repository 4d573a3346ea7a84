"""Notices that a run hangs, and says which rank it is. Used by the launcher of each node; no torch.

Each rank writes where it is to RUN/launch/rank_N.position (`utils/position.py`). This node's launcher reads the
positions of its ranks once a second and writes RUN/launch/node_K.json every few seconds, which `megatron-rft status`
and the other nodes' launchers read. When no rank of any node has moved for `faults.hang_s`, every launcher asks its
ranks and their engine processes for their Python stacks (SIGUSR2); node 0's writes RUN/launch/hang_TIME.txt.
"""

import contextlib
import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from megatron_rft.config.sections import Faults
from megatron_rft.launching.diagnosis import STOPPED_STATES, Diagnosis, RankState, describe, diagnose
from megatron_rft.launching.slurm import Node
from megatron_rft.utils.end_with_parent import children
from megatron_rft.utils.files import read_json, write_atomically
from megatron_rft.utils.position import Collective, Position, read
from megatron_rft.utils.processes import process_state

LOOK_S, WRITE_S = 1.0, 5.0
STACKS_S = 20.0  # at most, for processes to write their stacks
UNHANDLED = {"SigPnd", "ShdPnd", "SigBlk"}  # masks of proc(5): the kernel blocks a signal while its handler runs
SHORTEST_S = 300.0  # an automatic limit is never below
TIMES_LONGEST = 10.0
LEARNED_STEPS = 3  # steps after which the longest pauses count
GENERATING = ("generation", "reward", "refine", "evaluation")
REPEATED = (*GENERATING, "logprobs", "training", "verification", "part_norms", "sync", "checkpoint")  # alike each time
NFS_S = 15.0  # a node's file may be as old as this when another reads it


def position_file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.position"


def stack_folder(folder: Path) -> Path:
    return folder / "stacks"


def host_name() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


@dataclass
class Pauses:
    """The longest pause between two movements by phase, from which the limits of a step's phases follow."""

    faults: Faults
    longest: dict[str, float] = field(default_factory=dict)

    def note(self, phase: str, seconds: float) -> None:
        self.longest[phase] = max(self.longest.get(phase, 0.0), seconds)

    def limit(self, phase: str, step: int) -> float:
        """Seconds without movement in `phase` of `step` that count as a hang."""
        f = self.faults
        if f.hang_s is not None and phase != "start":
            return f.hang_s
        limits = dict.fromkeys(GENERATING, f.generation_limit_s)
        at_most = (limits | {"start": f.start_limit_s, "checkpoint": f.checkpoint_limit_s}).get(phase, f.step_limit_s)
        if phase not in REPEATED or phase not in self.longest or step <= LEARNED_STEPS:
            return at_most
        return min(at_most, max(SHORTEST_S, TIMES_LONGEST * self.longest[phase]))


class Watch:
    """Watches the ranks of this node. `look` is called often and does its work once a second."""

    def __init__(self, folder: Path, node: Node, faults: Faults, clock: Callable[[], float] = time.monotonic):
        self.folder, self.node, self.pauses = folder, node, Pauses(faults)
        self.clock, self.host = clock, host_name()
        self._since: dict[int, float] = {}  # rank -> when it was last seen to move
        self._positions: dict[int, Position] = {}
        self._looked = self._written = -1e9
        self._still = False  # whether all ranks of this node stand still for longer than their phases' limits
        self.hung: Diagnosis | None = None
        self._node_file(node.index).unlink(missing_ok=True)  # other nodes would take an earlier start's for this one's

    def look(self, numbers: list[int]) -> Diagnosis | None:
        """`numbers`: the ranks of this node. Returns the diagnosis once the whole run hangs."""
        now = self.clock()
        if now - self._looked < LOOK_S:
            return self.hung
        self._looked = now
        for rank in numbers:
            position, before = read(position_file(self.folder, rank), rank), self._positions.get(rank)
            if position is None or (before and position.moves == before.moves):
                continue
            if before:
                self.pauses.note(before.phase, now - self._since[rank])
            self._since[rank], self._positions[rank] = now, position
        self._still = bool(self._positions) and all(
            now - self._since[rank] > self.pauses.limit(position.phase, position.step)
            for rank, position in self._positions.items()
        )
        if self._still or now - self._written > WRITE_S:
            self._written = now
            self._write()
        if self._still:
            others = [read_json(self._node_file(i)) for i in range(self.node.count) if i != self.node.index]
            if all(other and other["still"] and time.time() - other["time"] < NFS_S for other in others):
                self.hung = self._explain()
        return self.hung

    def _states(self) -> list[RankState]:
        now = self.clock()
        states = []
        for rank, position in sorted(self._positions.items()):
            below = descendants(position.pid) if self._still else []  # it reads all of /proc
            stopped = tuple(f"pid {pid}" for pid in below if process_state(pid) in STOPPED_STATES)
            seen = {"host": self.host, "node": self.node.index, "state": process_state(position.pid)}
            states.append(RankState(**vars(position), **seen, still_s=now - self._since[rank], stopped=stopped))
        return states

    def _node_file(self, index: int) -> Path:
        return self.folder / f"node_{index}.json"

    def _write(self) -> None:
        content = {"time": time.time(), "host": self.host, "still": self._still, "pauses": self.pauses.longest}
        content["ranks"] = [asdict(state) for state in self._states()]
        with contextlib.suppress(OSError):  # a full disk is not this function's to report
            write_atomically(self._node_file(self.node.index), json.dumps(content))

    def _explain(self) -> Diagnosis:
        self._ask_for_stacks()
        states = self._states()
        for index in range(self.node.count):
            if index != self.node.index and (other := read_json(self._node_file(index))):
                for each in other["ranks"]:  # JSON has made lists of tuples
                    groups = {name: Collective(*last) for name, last in each["groups"].items()}
                    states.append(RankState(**each | {"groups": groups}))
        diagnosis = diagnose(states)
        if self.node.index == 0:
            self._write_report(diagnosis, states)
        return diagnosis

    def _ask_for_stacks(self) -> None:
        """Ask this node's ranks and their processes, and wait until all have written. A stopped process cannot."""
        asked = []
        for position in self._positions.values():
            for pid in (position.pid, *descendants(position.pid)):
                if "SigCgt" in masks(pid, signal.SIGUSR2) and process_state(pid) not in STOPPED_STATES:
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGUSR2)
                        asked.append(pid)
        wait_until_written(asked)

    def _write_report(self, found: Diagnosis, states: list[RankState]) -> None:
        parts = [f"The run hangs: {found.sentence}.", "", *describe(states)]
        for path in (each for s in states for each in sorted(stack_folder(self.folder).glob(f"rank_{s.rank}[._]*"))):
            parts += ["", f"---- {path.stem.replace('_', ' ')}", path.read_text(errors="replace").strip()]
            parts[-1] = parts[-1] or "(it did not answer: a stopped process writes no stack)"
        path = self.folder / time.strftime("hang_%Y%m%d_%H%M%S.txt")
        with contextlib.suppress(OSError):
            write_atomically(path, "\n".join(parts) + "\n")


def wait_until_written(asked: list[int]) -> None:
    """Wait until these processes have handled SIGUSR2, and so have written their stacks."""
    deadline = time.monotonic() + STACKS_S
    while time.monotonic() < deadline and any(masks(pid, signal.SIGUSR2) & UNHANDLED for pid in asked):
        time.sleep(0.1)


def descendants(pid: int) -> list[int]:
    found = children(pid)
    return found + [below for child in found for below in descendants(child)]


def masks(pid: int, number: int) -> set[str]:
    """The masks of a process (proc(5)) that a signal is in. Without a handler, in SigCgt, it would end the process."""
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
        found = re.findall(r"^(S\w+):\t([0-9a-f]{16})$", status, re.MULTILINE)
        return {name for name, bits in found if int(bits, 16) >> (number - 1) & 1}
    return set()
