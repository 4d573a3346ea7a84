"""Writes and reads a run's files of one JSON line per step: metrics, samples, and loads of experts.

    metrics.jsonl    {"step": 12, "time": 1700000000.0, "reward/mean": 0.41, ...}; docs/metrics.md explains the names
    samples.jsonl    {"step": 10, "time": 1700000000.0, "samples": [{"prompt": "2+2=", "tokens": ["4", "\\n"],
                     "reward": 1.0, "values": {"rollout_logprobs": [-0.1, -0.02]}, ...}]}

A file has every step exactly once, however often the run was killed: a resume drops an incomplete last line and the
steps that will run again. The size of the samples is bounded: a number of steps, a few responses each, and both ends of
a long response.
"""

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_rft.utils.files import write_atomically

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
NOTES_FILE = "notes.jsonl"
EXPERTS_FILE = "experts.jsonl"


def add_note(path: Path, note: str, alarm: bool = False) -> None:
    """Add what a run said beside its numbers (alarms, resumes, lost engines) to RUN/notes.jsonl."""
    line = {"time": round(time.time(), 3), "note": note} | ({"alarm": True} if alarm else {})
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


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


class StepFile:
    """Appends one JSON line per step. `resume_step`: the first step that this process will run; 0 starts a new file.

    Each line is flushed to the operating system at once, so that a killed process loses nothing. `sync`, called before
    a checkpoint, makes the lines survive a crash of the machine.
    """

    def __init__(self, path: Path, resume_step: int = 0):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():  # keeps only the complete lines of steps before `resume_step`
            lines = self.path.read_bytes().splitlines(keepends=True)
            kept = [line for line, record in _records(lines) if record["step"] < resume_step]
            if len(kept) < len(lines):
                write_atomically(self.path, b"".join(kept), sync=True)
        self._file = self.path.open("a", encoding="utf-8")
        self.steps = {record["step"] for record in read_metrics(self.path)}  # at the start
        self.last_step = max(self.steps, default=-1)

    def write(self, step: int, content: Mapping[str, Any]) -> None:
        """NaN and infinities, which JSON does not have, are written as null."""
        assert step > self.last_step, f"step {step} is already written: the last one is {self.last_step}"
        record: dict[str, Any] = {"step": step, "time": round(time.time(), 3)}
        for name, value in content.items():
            record[name] = None if isinstance(value, float) and not math.isfinite(value) else value
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()
        self.last_step = step

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


HEAD, TAIL = 384, 128  # tokens of a long response that are kept
MOST_TEXT = 4000  # characters of a prompt, an answer, a reason


@dataclass(frozen=True)
class Sample:
    """One response. `values`: numbers per token under the names of `Batch.tokens`; null if there is none."""

    prompt: str
    tokens: list[str]  # the texts of the tokens
    reward: float | None
    values: dict[str, list[float | None]]
    answer: str = ""  # the reference
    reason: str = ""  # the verifier's reason for the reward
    problem: int | None = None  # its index in the data set
    kind: str = "sampled"  # or another origin
    finished: bool = True
    shaping: float = 0.0
    # (first, end, reward) of the policy's turns; the tokens between them are the environment's. Empty: all the policy's
    turns: list[tuple[int, int, float]] = field(default_factory=list)
    # (first, end, number) of the pieces of an episode's segments; -s: of the prompt of segment s. Empty: one segment
    segments: list[tuple[int, int, int]] = field(default_factory=list)
    images: list[str] = field(default_factory=list)  # small copies of the prompt's and turns', as data URLs
    omitted: int = 0  # number of tokens that were left out
    head: int = HEAD  # number of tokens before the omitted ones


def due(step: int, total_steps: int, count: int) -> bool:
    """Return whether to record a step: the first, the last, and about `count` in all at even distances."""
    return count > 0 and (step in (1, total_steps) or step % math.ceil(total_steps / count) == 0)


def shortened(sample: Sample) -> dict[str, Any]:
    """Return the sample as JSON for the file, with long texts and responses shortened."""
    texts = {name: short(getattr(sample, name)) for name in ("prompt", "answer", "reason")}
    values = {name: [rounded(v) for v in ends(many)] for name, many in sample.values.items()}
    omitted = max(len(sample.tokens) - HEAD - TAIL, 0)
    return asdict(sample) | {"tokens": ends(sample.tokens), "values": values, "omitted": omitted} | texts


def ends(many: list) -> list:
    return many if len(many) <= HEAD + TAIL else many[:HEAD] + many[-TAIL:]


def short(text: str) -> str:
    half = MOST_TEXT // 2
    return text if len(text) <= MOST_TEXT else f"{text[:half]} [...] {text[-half:]}"


def rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 4)
