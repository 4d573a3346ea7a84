"""The training loop. Online, offline and supervised training differ only in the source of batches.

Every rank runs this file and holds the whole batch, so the algorithm is plain code; weights and activations, which
are distributed, are in megatron_rft.megatron.
"""

from abc import ABC, abstractmethod

from megatron_rft.objectives.base import Objective, State, Update
from megatron_rft.records import Batch
from megatron_rft.training.models import Models
from megatron_rft.training.run import TrainingRun
from megatron_rft.utils.errors import FINISHED, STOPPED


class Batches(ABC):
    """A source of batches. It keeps a colocated engine asleep during training."""

    def restore(self, state: State) -> State:
        """Restore what `state()` stored in a checkpoint. Returns the rest of the state."""
        return state

    def begin(self, step: int) -> bool:
        """Start the batch of `step`. Returns whether other processes now generate it while the trainer is idle."""
        return False

    @abstractmethod
    def next(self, step: int) -> Batch:
        """The batch of `step`. Collective."""

    @abstractmethod
    def publish(self, version: int, asked: bool, verify: bool = False) -> dict[str, float]:
        """Send the actor's weights after step `version` to the engine. Returns metrics of the sync. `asked`: an
        evaluation uses the engine next. `verify`: compare the weights bit by bit. Collective."""

    @abstractmethod
    def report(self, step: int, batch: Batch, updates: list[Update]) -> dict[str, float]:
        """Metrics, notes and samples of a batch after it is trained on."""

    def release(self, step: int, state: State) -> None:
        """Free what belongs to batches up to `step`, apart from those in the objective's `state`."""

    @abstractmethod
    def state(self) -> State:
        """State of pending batches for a checkpoint."""


def train(run: TrainingRun, batches: Batches, models: Models, objective: Objective) -> int:
    """Train until the last step, early stopping or a signal. Returns the exit status."""
    state = batches.restore(run.restore(objective.init()))
    batches.publish(run.done, run.evaluates_at_start, verify=True)
    before = run.evaluate_at_start()

    for step in run.steps():
        if batches.begin(step):
            models.while_waiting(state, run.phases)
        batch = batches.next(step)
        with run.phases("logprobs"):
            batch = models.outputs(batch)
            metrics = models.measure(batch, step)
        prepared = objective.prepare(batch, state)
        metrics |= prepared.metrics
        for update in prepared.updates:
            for mini_batch in update.steps():
                run.optimizer_step(update, mini_batch, step)
        models.end_of_step()
        state = prepared.state
        batches.release(step, state)
        metrics |= batches.publish(step, run.evaluation_due(step), run.comparison_due(step))
        metrics |= run.evaluate(step)
        metrics |= batches.report(step, batch, prepared.updates)
        if run.end_of_step(step, state, metrics, batches.state):
            return STOPPED

    run.conclude(batches.publish, before)
    return FINISHED
