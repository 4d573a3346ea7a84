"""Batches of stored data, for supervised and offline training."""

from collections.abc import Callable
from dataclasses import dataclass

from megatron_rft.objectives.base import State, Update
from megatron_rft.records import Batch
from megatron_rft.training.loop import Batches
from megatron_rft.training.run import TrainingRun


@dataclass
class StoredBatches(Batches):
    """Draws `size` items of the run's stream per step; `make` turns them into a batch. An engine, if there is one, is
    for evaluations alone, and sleeps during training."""

    run: TrainingRun
    size: int
    make: Callable[[list], Batch]

    def next(self, step: int) -> Batch:
        if self.run.weights:
            self.run.weights.sleep()
        return self.make(self.run.stream.next(self.size))

    def publish(self, version: int, asked: bool, verify: bool = False) -> dict[str, float]:
        weights = self.run.weights
        if not asked or weights is None or weights.sent(version):
            return {}
        with self.run.phases("sync"):
            return weights.send(version, verify)

    def report(self, step: int, batch: Batch, updates: list[Update]) -> dict[str, float]:
        return {"tokens/trained": float(batch.lengths.sum())}

    def state(self) -> State:
        if self.run.weights:
            self.run.weights.sleep_to_save()
        return {}
