"""Evaluates the model in an engine on a recipe's problems, and writes the answers to the run's folder."""

import json
from collections import ChainMap
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from megatron_rft.config import Evaluation
from megatron_rft.config.messages import many
from megatron_rft.evaluation.evaluate import EvalResult, EvaluationCache, GradedSampler, evaluate, write
from megatron_rft.evaluation.passk import with_error
from megatron_rft.megatron import weights
from megatron_rft.megatron.actor import Actor
from megatron_rft.objectives.base import State
from megatron_rft.records import Prompt
from megatron_rft.utils.files import read_json

PREFIX = "selection."
EVALUATION = "evaluation.json"  # in the best model's folder


class BestModel:
    """Keeps the model of the best evaluation in `folder`, in Hugging Face format, with its step and accuracy. With
    adapters it keeps these alone. Only evaluations during training count; the initial model is not a candidate.

    `patience`: evaluations without a new best after which the run ends; None: never.
    """

    def __init__(self, actor: Actor, folder: Path, tokenizer_folder: Path, patience: int | None):
        self.actor, self.folder, self.tokenizer_folder, self.patience = actor, folder, tokenizer_folder, patience
        self.accuracy, self.step = -1.0, 0  # of the best evaluation; 0: there is none
        self.waited = 0  # evaluations since

    @property
    def exhausted(self) -> bool:
        return self.patience is not None and self.waited >= self.patience

    def judge(self, accuracy: float, step: int) -> None:
        """Saves the actor's current weights if their evaluation is a new best; an equal one is not. Collective."""
        if not accuracy > self.accuracy:  # also NaN, where the grader failed on everything
            self.waited += 1
            return
        self.accuracy, self.step, self.waited = accuracy, step, 0
        beside = {EVALUATION: json.dumps({"step": step, "pass@1": accuracy})}
        stream = self.actor.stream(adapters=self.actor.lora is not None)
        weights.save_folder(stream, self.folder, self.actor.hf_config, self.tokenizer_folder, beside)

    def load(self) -> tuple[int, float] | None:
        """Loads the best weights into the actor, and returns their step and accuracy; None, without change, if nothing
        was evaluated. After a kill the folder can be of a later step than the checkpoint's."""
        if not self.step:
            return None
        if self.actor.lora:
            files = [load_file(path) for path in self.folder.glob("*.safetensors")]
            self.actor.load(ChainMap(*files).__getitem__, adapters=True)
        else:
            self.actor.load(weights.open_folder(self.folder, self.actor.hf_config))
        result = read_json(self.folder / EVALUATION)
        return result["step"], result["pass@1"]

    def state(self) -> State:
        """What a checkpoint holds."""
        values = {"best": self.accuracy, "step": self.step, "waited": self.waited}
        return {PREFIX + name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}

    def restore(self, state: State) -> State:
        """Restore what a checkpoint holds. Returns the rest of its state."""
        if PREFIX + "best" in state:
            best, step, waited = (state[PREFIX + name].item() for name in ("best", "step", "waited"))
            self.accuracy, self.step, self.waited = best, int(step), int(waited)
        return {name: value for name, value in state.items() if not name.startswith(PREFIX)}


@dataclass
class Evaluator:
    """Divides the problems among the ranks. Writes the answers under `folder`."""

    options: Evaluation
    sampler: GradedSampler
    folder: Path
    given: dict[str, list[Prompt]]  # problems by part
    gather: Callable[[list], list] = list
    rank: int | None = 0  # among the ranks that drive an engine; None: this rank drives none
    world: int = 1

    def measure(self, part: str, cache: EvaluationCache | None = None) -> EvalResult:
        sampler = replace(self.sampler, samples=self.samples(part))
        where = {"rank": self.rank, "world": self.world, "batch": self.options.batch}
        return evaluate(sampler, self.given[part], self.gather, name=part, cache=cache, **where)

    def samples(self, part: str) -> int:
        benchmark = self.options.benchmarks.get(part)
        return (benchmark and benchmark.samples) or self.options.samples

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
    return f"pass@1 {' -> '.join(both)} ({many(after['problems'], 'problem')})"
