"""Evaluates the model in an engine on a recipe's problems, and writes the answers to the run's folder."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatron_rft.config import Evaluation
from megatron_rft.evaluation.cache import EvaluationCache
from megatron_rft.evaluation.evaluate import EvalResult, GradedSampler, evaluate, write
from megatron_rft.evaluation.passk import with_error
from megatron_rft.records import Prompt
from megatron_rft.training.problems import Problems


@dataclass
class Evaluator:
    """Divides the problems among the ranks. Writes the answers under `folder`."""

    options: Evaluation
    problems: Problems
    sampler: GradedSampler
    folder: Path
    gather: Callable[[list], list] = list
    rank: int | None = 0  # among the ranks that drive an engine; None: this rank drives none
    world: int = 1
    given: dict[str, list[Prompt]] = field(default_factory=dict)  # problems of parts without a data source

    def measure(
        self, part: str, prompts: list[Prompt] | None = None, cache: EvaluationCache | None = None
    ) -> EvalResult:
        """Evaluate the problems of a part, or `prompts`."""
        return evaluate(
            replace(self.sampler, samples=self.samples(part)),
            self.prompts(part) if prompts is None else prompts,
            self.gather,
            rank=self.rank,
            world=self.world,
            batch=self.options.batch,
            name=part,
            cache=cache,
        )

    def prompts(self, part: str) -> list[Prompt]:
        found = self.given[part] if part in self.given else self.problems.prompts(part, self.sampler.tokenizer).prompts
        return found[: self.options.limit]

    def samples(self, part: str) -> int:
        own = None if part in self.given else self.problems.source(part).samples
        return own or self.options.samples

    def __call__(self, part: str, step: int) -> dict[str, float]:
        """Evaluate data.`part` and record the result under `step`. Returns `EvalResult.summary`."""
        result = self.measure(part)
        if self.rank == 0:
            write([result], self._folder(part, step))
        return result.summary()

    def recorded(self, part: str, step: int) -> dict[str, float] | None:
        """The result that an earlier start of this run recorded at `step`."""
        path = self._folder(part, step) / "results.json"
        return json.loads(path.read_text())[0] if path.is_file() else None

    def _folder(self, part: str, step: int) -> Path:
        return self.folder / f"{part}_step_{step:06d}"


def headline(before: dict[str, float] | None, after: dict[str, float]) -> str:
    """For example: pass@1 0.31 ± 0.02 -> 0.58 ± 0.02 (500 problems)."""
    both = [with_error(r["pass_at_1"], r["standard_error"], digits=2) for r in (before, after) if r]
    return f"pass@1 {' -> '.join(both)} ({after['problems']} problems)"
