"""Distillation as a plug-in: the base's loss plus a coefficient times the mean divergence from a teacher."""

from dataclasses import replace

from megatron_rft.config.plugins import Distil
from megatron_rft.objectives.base import Loss, LossFunction, Outputs, Plugin, Prepared, State, Update
from megatron_rft.objectives.distil import divergence, needed, second
from megatron_rft.records import Batch
from megatron_rft.utils.errors import ConfigError


class Distilled(Plugin):
    options: Distil

    def prepare(self, batch: Batch, state: State) -> Prepared:
        prepared = self.base.prepare(batch, state)
        updates = [self._distilled(each) if each.model == "actor" else each for each in prepared.updates]
        return replace(prepared, updates=updates)

    def _distilled(self, update: Update) -> Update:
        if update.second:  # of the user's algorithm; the package's own are refused with the recipe
            raise ConfigError("distil: the loss of this algorithm compares with another distribution already")
        return replace(
            update,
            batch=update.batch.without_sequences("no_gradient"),  # every response has a gradient
            loss=self._with_divergence(update.loss),
            outputs=update.outputs | needed(self.options),
            second=second(self.options),
        )

    def _with_divergence(self, base_loss: LossFunction) -> LossFunction:
        def loss(outputs: Outputs, batch: Batch) -> Loss:
            base = base_loss(outputs, batch)
            distance, metrics = divergence(outputs, batch, self.options)
            terms = base.terms | {"distillation": (self.options.coefficient, distance)}
            return Loss(terms, base.metrics | metrics)

        return loss
