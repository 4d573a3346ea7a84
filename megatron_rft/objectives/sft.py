"""Supervised fine-tuning: the mean negative log-likelihood of response tokens. The warm start of an RL run."""

from megatron_rft.config.algorithms import sft as section
from megatron_rft.objectives.base import Loss, Objective, Outputs, Prepared, State, Update
from megatron_rft.objectives.surrogates import aggregate
from megatron_rft.records import Batch


class SFT(Objective):
    options: section.SFT

    def loss(self, outputs: Outputs, batch: Batch) -> Loss:
        return Loss({"nll": (1.0, aggregate(-outputs["logprobs"], batch, "token_mean"))})

    def prepare(self, batch: Batch, state: State) -> Prepared:
        return Prepared([Update("policy", batch, self.loss)], state)
