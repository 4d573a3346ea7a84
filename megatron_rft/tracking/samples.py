"""Records a few responses of some steps, token by token, for the report: RUN/samples.jsonl, one line per step.

    {"step": 10, "time": 1700000000.0, "samples": [{"prompt": "2+2=", "tokens": ["4", "\\n"], "reward": 1.0,
     "values": {"rollout_logprobs": [-0.1, -0.02]}, ...}]}

The file's size is bounded: a number of steps, a few responses each, and only both ends of a long response.
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
    omitted: int = 0  # number of tokens that were left out
    head: int = HEAD  # number of tokens before the omitted ones


def due(step: int, total_steps: int, count: int) -> bool:
    """Return whether to record a step: the first, the last, and about `count` in all at even distances."""
    return count > 0 and (step in (1, total_steps) or step % math.ceil(total_steps / count) == 0)


def shortened(sample: Sample) -> Sample:
    """Return the sample for the file, with long texts and responses shortened."""
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
    """Writes each recorded step once, like the metrics file."""

    def log(self, step: int, samples: list[Sample]) -> None:
        self.write(step, {"samples": [asdict(shortened(sample)) for sample in samples]})


def read_samples(path: Path) -> list[Mapping[str, Any]]:
    """Return the records of the complete lines; none if there is no file."""
    return read_metrics(path) if Path(path).is_file() else []
