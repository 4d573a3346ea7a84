"""Batches of stored data, for supervised and offline training."""

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rft.config import Recipe
from megatron_rft.data.stream import Stream
from megatron_rft.inference.weight_sync import EngineWeights
from megatron_rft.megatron import parallel
from megatron_rft.objectives.base import Objective, State, Update
from megatron_rft.records import Batch, Prompt
from megatron_rft.rewards.registry import build as build_reward
from megatron_rft.tracking.throughput import Phases
from megatron_rft.training import loop
from megatron_rft.training.build import evaluation_sampler
from megatron_rft.training.engines import EngineBuilder
from megatron_rft.training.episodes import around
from megatron_rft.training.evaluator import Evaluator
from megatron_rft.training.loop import Batches
from megatron_rft.training.models import Models
from megatron_rft.training.problems import Problems
from megatron_rft.training.run import TrainingRun


@dataclass
class StoredBatches(Batches):
    """Draws `size` items of a stream per step; `make` turns them into a batch. `weights`: of the evaluations' engine,
    which sleeps during training; None without evaluations."""

    stream: Stream
    size: int
    make: Callable[[list], Batch]
    weights: EngineWeights | None
    phases: Phases

    def next(self, step: int) -> Batch:
        if self.weights:
            self.weights.sleep()
        return self.make(self.stream.next(self.size))

    def publish(self, version: int, asked: bool, verify: bool = False) -> dict[str, float]:
        if not asked or self.weights is None or self.weights.sent(version):
            return {}
        with self.phases("sync"):
            return self.weights.send(version, verify)

    def report(self, step: int, batch: Batch, updates: list[Update]) -> dict[str, float]:
        return {"tokens/trained": float(batch.lengths.sum())}

    def state(self) -> State:
        if self.weights:
            self.weights.sleep_to_save()
        return {}


def train_stored(
    recipe: Recipe,
    tokenizer: Any,
    models: Models,
    objective: Objective,
    stream: Stream,
    size: int,
    steps: int,
    make: Callable[[list], Batch],
    dropped: dict[str, int],
    given: dict[str, list[Prompt]],
) -> int:
    """Train with `StoredBatches` of `size` items. An engine is built for evaluations alone. `dropped`: as of
    `TrainingRun`; `given`: problems of parts without a data source in the recipe. Returns the exit status."""
    with ExitStack() as stack:
        evaluator = weights = None
        if recipe.validates or recipe.data.test:
            reward = stack.enter_context(closing(build_reward(recipe.reward)))
            engines = EngineBuilder(recipe)
            engine, weights = engines.build_beside(list(models.trained.values()))
            player = around(engine, engines, tokenizer, stack)
            options, problems = recipe.evaluation, Problems(recipe.data, recipe.environment)
            sampler = evaluation_sampler(options, recipe.rollout, player, tokenizer, reward, recipe.run.seed)
            folder = Path(recipe.run.output_dir) / "evaluation"
            evaluator = Evaluator(options, problems, sampler, folder, parallel.gather, *player.driver(), given)
        run = stack.enter_context(closing(TrainingRun(recipe, models, stream, steps, evaluator, dropped)))
        batches = StoredBatches(stream, size, make, weights, run.phases)
        return loop.train(run, batches, models, objective)
