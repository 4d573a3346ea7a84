"""Batches of stored data, for supervised and offline training."""

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron_rft.config import Recipe
from megatron_rft.data.stream import Stream
from megatron_rft.inference.weight_sync import EngineWeights
from megatron_rft.objectives.base import State, Update
from megatron_rft.records import Batch, Prompt
from megatron_rft.rewards.registry import build as build_reward
from megatron_rft.tracking.throughput import Phases
from megatron_rft.training import build
from megatron_rft.training.engines import EngineBuilder, build_beside
from megatron_rft.training.episodes import around
from megatron_rft.training.evaluator import Evaluator
from megatron_rft.training.loop import Batches
from megatron_rft.training.models import Models


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


def build_evaluator(
    recipe: Recipe, hf_config: Any, tokenizer: Any, models: Models, stack: ExitStack, **given: list[Prompt]
) -> tuple[Evaluator | None, EngineWeights | None]:
    """The evaluator of a run that uses an engine only for evaluations; (None, None) without evaluations. `given`:
    problems of parts without a data source in the recipe."""
    if not recipe.validates and not recipe.data.test:
        return None, None
    reward = stack.enter_context(closing(build_reward(recipe.reward)))
    trained, builder = list(models.trained.values()), EngineBuilder.of(recipe)
    engine, weights = build_beside(trained, partial(builder.build, hf_config), recipe.rollout.offload_trainer)
    player = around(engine, builder, tokenizer, stack)
    return build.build_evaluator(recipe, player, tokenizer, reward, **given), weights
