"""A few responses of some steps, token by token, for the report: RUN/samples.jsonl, one line a step.

    {"step": 10, "time": 1700000000.0, "samples": [{"prompt": "2+2=", "tokens": ["4", "\\n"], "reward": 1.0,
     "values": {"rollout_logprobs": [-0.1, -0.02]}, ...}]}

Bounded whatever the run's length: so many steps, a few responses each, of a long response its two ends.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megatron_rft.tracking.metrics import StepFile, read_metrics

SAMPLES_FILE = "samples.jsonl"
HEAD, TAIL = 384, 128  # tokens of a long response that are kept
MOST_TEXT = 4000  # characters of a prompt, an answer, a reason


@dataclass(frozen=True)
class Sample:
    """One response. `values`: numbers per token under the names of `Batch.tokens`, null where there is none."""

    prompt: str
    tokens: list[str]  # texts; together they are the response
    reward: float | None
    values: dict[str, list[float | None]]
    answer: str = ""  # the reference
    reason: str = ""  # of the reward
    problem: int | None = None  # its place in the data set
    kind: str = "sampled"  # or who else wrote it
    finished: bool = True
    shaping: float = 0.0
    omitted: int = 0  # tokens left out
    head: int = HEAD  # after so many


def due(step: int, total_steps: int, count: int) -> bool:
    """The first step, the last, and about `count` in all, evenly spread: a function of the step alone."""
    return count > 0 and (step in (1, total_steps) or step % math.ceil(total_steps / count) == 0)


def shortened(sample: Sample) -> Sample:
    """The sample with long texts and responses shortened, as it goes into the file."""
    texts = {name: short(getattr(sample, name)) for name in ("prompt", "answer", "reason")}
    values = {name: [rounded(v) for v in ends(many)] for name, many in sample.values.items()}
    omitted = max(len(sample.tokens) - HEAD - TAIL, 0)
    return replace(sample, tokens=ends(sample.tokens), values=values, omitted=omitted, **texts)


def ends(many: list) -> list:
    return many if len(many) <= HEAD + TAIL else many[:HEAD] + many[-TAIL:]


def short(text: str) -> str:
    half = MOST_TEXT // 2
    return text if len(text) <= MOST_TEXT else f"{text[:half]} [...] {text[-half:]}"


def rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 4)


class SamplesFile(StepFile):
    """Has every step once, as the metrics file does."""

    def log(self, step: int, samples: list[Sample]) -> None:
        self.write(step, {"samples": [asdict(shortened(sample)) for sample in samples]})


def read_samples(path: Path) -> list[Mapping[str, Any]]:
    """The complete lines; none where there is no file."""
    return read_metrics(path) if Path(path).is_file() else []
