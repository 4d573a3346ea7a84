"""Supervised fine-tuning: the mean negative log-likelihood of response tokens. The warm start of an RL run."""

from dataclasses import dataclass

from megatron_rft.objectives.base import Loss, Objective, Outputs, Prepared, State, Update
from megatron_rft.objectives.surrogates import aggregate
from megatron_rft.records import Batch


@dataclass(frozen=True)
class SFT(Objective):
    def loss(self, outputs: Outputs, batch: Batch) -> Loss:
        return Loss({"nll": (1.0, aggregate(-outputs["logprobs"], batch, "token_mean"))})

    def prepare(self, batch: Batch, state: State) -> Prepared:
        return Prepared([Update("policy", batch, self.loss)], state)
