"""Measures the gradient norm of each part of a loss separately, every `every` steps."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_rft.megatron.actor import Actor
from megatron_rft.objectives.base import LossFunction, Update
from megatron_rft.records import Batch

Parts = Callable[[LossFunction, str], LossFunction]


def due(every: int, step: int) -> bool:
    """True in the first step and every `every`-th step; never if `every` is 0."""
    return bool(every) and (step == 1 or step % every == 0)


@dataclass(frozen=True)
class GradientNorms:
    """`part_of(loss, name)` is the loss restricted to one part; its gradient norm is the metric `prefix` + name."""

    every: int
    prefix: str
    names: tuple[str, ...]
    part_of: Parts
    wanted: Callable[[Update], bool]  # whether an update has these parts

    def due(self, update: Update, step: int) -> bool:
        return update.model == "actor" and due(self.every, step) and self.wanted(update)

    def measure(
        self, actor: Actor, update: Update, batch: Batch, counts: dict[str, float], second: Any
    ) -> dict[str, float]:
        """Collective. One backward pass for each part; the weights do not change."""
        found = {}
        for name in self.names:
            loss = self.part_of(update.loss, name)
            actor.backward(batch, loss, counts, update.outputs, second)
            found[self.prefix + name] = actor.optimizer.grad_norm()
        return found
