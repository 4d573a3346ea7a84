"""Where a rank is: step, phase, micro-batch, and its last collective in each process group. Imports no torch.

`here` is this process's position. A rank of a launcher opens RUN/launch/rank_N.position, a memory-mapped file that the
launcher reads once a second (`launching/hangs.py`); elsewhere it is plain memory. An update takes about a microsecond
and makes no system call.
"""

import ctypes
import faulthandler
import mmap
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from megatron_rft.utils.files import read_json

GROUPS = 64  # a rank's groups and neighbours beyond these are not recorded
STACKS = "MEGATRON_RFT_STACKS"  # what the paths of stacks of a rank and its engine processes begin with


class _Group(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char * 48), ("members", ctypes.c_char * 64), ("operation", ctypes.c_char * 24)]
    _fields_ += [("number", ctypes.c_int64)]


class _Record(ctypes.Structure):
    _fields_ = [("moves", ctypes.c_uint64), ("pid", ctypes.c_int32), ("step", ctypes.c_int32)]
    _fields_ += [("micro_batch", ctypes.c_int32), ("waiting", ctypes.c_int32), ("last", ctypes.c_int32)]
    _fields_ += [("phase", ctypes.c_char * 24), ("groups", _Group * GROUPS)]


class Collective(NamedTuple):
    """The last operation of a rank in one group. `number` counts the group's operations from 1."""

    members: str
    operation: str
    number: int


@dataclass(frozen=True)
class Position:
    """A position as another process reads it. `moves` changes with every update. `last`: the group of the last
    collective."""

    rank: int
    moves: int = 0
    pid: int = 0
    step: int = 0
    phase: str = ""
    micro_batch: int = 0
    waiting: bool = False
    last: str = ""
    groups: dict[str, Collective] = field(default_factory=dict)


class Here:
    """This process's position, which it alone writes."""

    def __init__(self) -> None:
        self._record, self._slots = _Record(), {}
        self.waited_s = 0.0  # for collectives, since this process began

    def open(self, path: Path) -> None:
        """Write to `path` from now on."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(ctypes.sizeof(_Record)))
        with path.open("r+b") as file:
            self._record = _Record.from_buffer(mmap.mmap(file.fileno(), 0))
        self._record.pid, self._record.last = os.getpid(), -1
        self._slots.clear()
        self.enter("start")

    def move(self) -> None:
        """For long work between collectives, such as decoding: it advances."""
        self._record.moves += 1

    def begin_step(self, step: int) -> None:
        self._record.step = step
        self._record.moves += 1

    def enter(self, phase: str) -> None:
        self._record.phase, self._record.micro_batch = phase.encode()[:23], 0
        self._record.moves += 1

    def next_micro_batch(self) -> None:
        self._record.micro_batch += 1
        self._record.moves += 1

    def knows(self, key: str) -> bool:
        return key in self._slots

    def add_group(self, key: str, name: str, members: str) -> None:
        """`key`: the same on all members. `members`: as `shortened`."""
        self._slots[key] = len(self._slots)
        if self._slots[key] < GROUPS:
            slot = self._record.groups[self._slots[key]]
            slot.name, slot.members = name.encode()[:47], members.encode()[:63]

    def collective(self, key: str, operation: str) -> None:
        """An operation of a known group begins."""
        self._record.moves += 1
        if (index := self._slots[key]) < GROUPS:
            slot = self._record.groups[index]
            slot.operation, slot.number = operation.encode()[:23], slot.number + 1
            self._record.last = index

    def wait(self, waiting: bool) -> None:
        """Whether the process is inside a wait for a collective."""
        self._record.waiting = waiting
        self._record.moves += 1


here = Here()


def read(path: Path, rank: int) -> Position | None:
    """None: the rank has not begun yet."""
    try:
        record = _Record.from_buffer_copy(path.read_bytes())
    except (OSError, ValueError):
        return None
    groups = {
        slot.name.decode(): Collective(slot.members.decode(), slot.operation.decode(), slot.number)
        for slot in record.groups
        if slot.number
    }
    last = record.groups[record.last].name.decode() if record.last >= 0 else ""
    phase, waiting = record.phase.decode(), bool(record.waiting)
    return Position(rank, record.moves, record.pid, record.step, phase, record.micro_batch, waiting, last, groups)


def read_nodes(folder: Path) -> list[dict]:
    """What the launcher of each node has written last (`launching/hangs.py`), by the node's number."""
    paths = sorted(folder.glob("node_*.json"), key=lambda path: int(path.stem.removeprefix("node_")))
    return [node for path in paths if (node := read_json(path))]


def shortened(ranks: list[int]) -> str:
    """0-6/2 for 0, 2, 4, 6; other lists with commas."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if len(ranks) > 2 and step > 0 and ranks == list(range(ranks[0], ranks[-1] + 1, step)):
        return f"{ranks[0]}-{ranks[-1]}/{step}"
    return ",".join(map(str, ranks))


def members(text: str) -> list[int]:
    """The ranks of `shortened`; a list that was cut off has its first ranks."""
    if "-" in text:
        bounds, _, step = text.partition("/")
        first, last = map(int, bounds.split("-"))
        return list(range(first, last + 1, int(step)))
    return [int(rank) for rank in text.split(",") if rank]


def write_stacks_on_signal(path: Path) -> None:
    """SIGUSR2 writes the Python stacks of all threads of this process to `path`, also from within C code."""
    path.parent.mkdir(parents=True, exist_ok=True)
    faulthandler.register(signal.SIGUSR2, file=path.open("w"), all_threads=True)


# A forked child, such as a checkpoint's writer, has the same file: its stacks would be written among its parent's.
os.register_at_fork(after_in_child=lambda: faulthandler.unregister(signal.SIGUSR2))


def write_engine_stacks() -> None:
    """In an engine process that a rank started: the same, into the run's folder."""
    if rank := os.environ.get(STACKS):
        write_stacks_on_signal(Path(f"{rank}_engine_{os.getpid()}.stack"))
