"""Writes and reads a run's metrics: one JSON line per step, {"step": 12, "time": 1700000000.0, "reward/mean": 0.41,
...}.

The file has every step exactly once, however often the run was killed: a resume drops an incomplete last line and the
steps that will run again. NaN and infinities, which JSON does not have, are written as null. docs/metrics.md explains
the names.
"""

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_rft.utils.files import write_atomically


def _valid(value: Any) -> int | float | None:
    """Return a number that JSON supports, else None. A Tensor of one element counts as a number."""
    if isinstance(value, int):
        return int(value)
    value = float(value)
    return value if math.isfinite(value) else None


def _records(lines: list[bytes]) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield (line, record) for the complete lines with increasing steps."""
    last_step = -math.inf
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if line.endswith(b"\n") and isinstance(record, dict) and record.get("step", last_step) > last_step:
            last_step = record["step"]
            yield line, record


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of all complete lines, oldest first. A run may be writing to the file."""
    return [record for _, record in _records(Path(path).read_bytes().splitlines(keepends=True))]


def drop_from(path: Path, step: int) -> None:
    """Keep only the complete lines of steps before `step`. The file is replaced atomically."""
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line, record in _records(lines) if record["step"] < step]
    if len(kept) == len(lines):
        return
    write_atomically(path, b"".join(kept), sync=True)


class StepFile:
    """Appends one JSON line per step. `resume_step`: the first step that this process will run; 0 starts a new file.

    Each line is flushed to the operating system at once, so that a killed process loses nothing. `sync`, called before
    a checkpoint, makes the lines survive a crash of the machine.
    """

    def __init__(self, path: Path, resume_step: int = 0):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            drop_from(self.path, resume_step)
        self._file = self.path.open("a", encoding="utf-8")
        self.last_step = max((record["step"] for record in read_metrics(self.path)), default=-1)

    def write(self, step: int, content: Mapping[str, Any]) -> None:
        assert step > self.last_step, f"step {step} is already written: the last one is {self.last_step}"
        record = {"step": step, "time": round(time.time(), 3), **content}
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()
        self.last_step = step

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class MetricsFile(StepFile):
    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.write(step, {name: _valid(value) for name, value in metrics.items()})
