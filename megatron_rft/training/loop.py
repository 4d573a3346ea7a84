"""The training loop. Online, offline and supervised training differ in where a batch comes from, and in nothing else.

Every rank runs this file. Whatever is small (the batch with its numbers per token) every rank holds whole, so that the
algorithm is plain code; whatever is large (weights, activations) lives under megatron_rft.megatron.
"""

from typing import Protocol

from megatron_rft.objectives.base import Objective, State, Update
from megatron_rft.records import Batch
from megatron_rft.training.models import Models
from megatron_rft.training.run import Run
from megatron_rft.utils.exit_codes import FINISHED, STOPPED


class Batches(Protocol):
    """A source of batches. It keeps the engine asleep while the trainer works."""

    def restore(self, state: State) -> State:
        """Take what `state()` gave to a checkpoint; returns the rest of it."""
        ...

    def next(self, step: int) -> Batch:
        """The batch of `step`. Collective."""
        ...

    def publish(self, version: int, asked: bool, verify: bool = False) -> dict[str, float]:
        """Bring the actor's weights, those after step `version`, to whoever needs them; metrics of the sync. `asked`:
        an evaluation asks the engine next. `verify`: compare them bit by bit. Collective."""
        ...

    def report(self, step: int, batch: Batch, updates: list[Update]) -> dict[str, float]:
        """Metrics, notes and samples of a batch, once it is trained on."""
        ...

    def state(self) -> State:
        """What a checkpoint must hold of batches under way."""
        ...


def train(run: Run, batches: Batches, models: Models, objective: Objective) -> int:
    """Steps until the last, until early stopping, or until a signal; returns the exit status."""
    state = batches.restore(run.restore(objective.init()))
    batches.publish(run.done, run.evaluates_at_start, verify=True)
    before = run.evaluate_at_start()

    for step in run.steps():
        batch = batches.next(step)
        with run.phases("logprobs"):
            batch = models.outputs(batch)
            metrics = models.measure(batch, step)
        prepared = objective.prepare(batch, state)
        metrics |= prepared.metrics
        for update in prepared.updates:
            for mini_batch in update.steps():
                metrics |= run.optimizer_step(update, mini_batch, step)
        models.end_of_step()
        state = prepared.state
        metrics |= batches.publish(step, run.evaluation_due(step), run.comparison_due(step))
        metrics |= run.evaluate(step)
        metrics |= batches.report(step, batch, prepared.updates)
        if run.end_of_step(step, state, metrics, batches.state):
            return STOPPED

    run.conclude(batches.publish, before)
    return FINISHED
