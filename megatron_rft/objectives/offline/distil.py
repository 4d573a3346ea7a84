"""Distillation on stored trajectories: the loss of objectives/distil.py, on tokens that another policy sampled."""

from megatron_rft.config.algorithms import offline as section
from megatron_rft.objectives.base import Loss, Outputs, SecondDistribution, Sum
from megatron_rft.objectives.distil import divergence, needed, second
from megatron_rft.objectives.offline.base import Offline
from megatron_rft.records import Batch


class OfflineDistil(Offline):
    options: section.OfflineDistillation

    @property
    def outputs(self) -> frozenset[str]:
        return needed(self.options)

    @property
    def second(self) -> SecondDistribution:
        return second(self.options)

    def terms(self, outputs: Outputs, batch: Batch) -> dict[str, tuple[float, Sum]]:
        return {"distillation": (1.0, divergence(outputs, batch, self.options)[0])}

    def loss(self, outputs: Outputs, batch: Batch) -> Loss:
        found = super().loss(outputs, batch)
        return Loss(found.terms, found.metrics | divergence(outputs, batch, self.options)[1])
