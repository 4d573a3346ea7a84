"""Batches of data that is there before the run begins."""

from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

from megatron_rft.config import Recipe
from megatron_rft.data.stream import Stream
from megatron_rft.objectives.base import State, Update
from megatron_rft.records import Batch, Prompt
from megatron_rft.rewards.registry import build as build_reward
from megatron_rft.tracking.phases import Phases
from megatron_rft.training import build
from megatron_rft.training.engines import EngineBuilder, EngineWeights
from megatron_rft.training.evaluator import Evaluator
from megatron_rft.training.models import Models


class StoredBatches:
    """`size` items of a stream a step, which `make` turns into a batch. `weights`: of the engine that evaluations ask,
    which is awake for them alone; None where there are none."""

    def __init__(
        self, stream: Stream, size: int, make: Callable[[list], Batch], weights: EngineWeights | None, phases: Phases
    ):
        self.stream, self.size, self.make, self.weights, self.phases = stream, size, make, weights, phases
        self.published: int | None = None

    def restore(self, state: State) -> State:
        return state

    def next(self, step: int) -> Batch:
        if self.weights:
            self.weights.sleep()
        return self.make(self.stream.next(self.size))

    def publish(self, version: int, asked: bool, verify: bool = False) -> dict[str, float]:
        if not asked or self.weights is None or version == self.published:
            return {}
        self.published = version
        with self.phases("sync"):
            return self.weights.push(version, verify)

    def report(self, step: int, batch: Batch, updates: list[Update]) -> dict[str, float]:
        return {"tokens/trained": float(batch.lengths.sum())}

    def state(self) -> State:
        return {}


def build_evaluator(
    recipe: Recipe, hf_config: Any, tokenizer: Any, models: Models, stack: ExitStack, **given: list[Prompt]
) -> tuple[Evaluator | None, EngineWeights | None]:
    """The evaluator of a run that needs an engine for nothing else; Nones where there is nothing to ask. `given`: the
    problems of parts that the recipe has no data source for."""
    if not recipe.validates and not recipe.data.test:
        return None, None
    reward = stack.enter_context(closing(build_reward(recipe.reward)))
    engine = stack.enter_context(closing(EngineBuilder.of(recipe).build(hf_config)))
    evaluator = build.build_evaluator(recipe, engine, tokenizer, reward, **given)
    return evaluator, EngineWeights(models.actor, engine)
