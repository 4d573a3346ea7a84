"""The gradient's norm of each part of a loss by itself, every so many steps."""

from collections.abc import Callable, Mapping
from typing import Any

from megatron_rft.megatron.actor import Actor
from megatron_rft.objectives.base import LossFunction, Update
from megatron_rft.records import Batch


def due(every: int, step: int) -> bool:
    """In the first step and then in each `every`-th; never where that is 0."""
    return bool(every) and (step == 1 or step % every == 0)


def gradient_norms(
    actor: Actor, update: Update, batch: Batch, parts: Mapping[str, LossFunction], second: Callable[[], Any]
) -> dict[str, float]:
    """Collective. One backward pass for each of `parts`, at the present weights, which stay as they are; `second` gives
    the second model's part of a pass. The norms, by the names of `parts`."""
    found = {}
    for name, loss in parts.items():
        actor.backward(batch, loss, update.counts(batch), update.outputs, second())
        found[name] = actor.optimizer.grad_norm()
    return found
