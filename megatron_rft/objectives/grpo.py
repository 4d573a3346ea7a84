"""GRPO: group-relative advantages, a clipped token ratio, KL to the reference in the loss (pipo.txt Eq. 3, A.2)."""

from dataclasses import dataclass

from torch import Tensor

from megatron_rft.objectives.advantages import group_normalised, group_relative, to_tokens
from megatron_rft.objectives.base import Loss, Outputs, PolicyObjective, Prepared, State, Update
from megatron_rft.objectives.kl import ESTIMATORS
from megatron_rft.objectives.mismatch import mismatch_sums
from megatron_rft.objectives.surrogates import aggregate, token_surrogate
from megatron_rft.records import Batch


@dataclass(frozen=True)
class GRPO(PolicyObjective):
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coefficient: float = 0.001
    kl_estimator: str = "k3"
    entropy_coefficient: float = 0.0
    aggregation: str = "sequence_mean"
    mini_batches: int = 1
    epochs: int = 1

    @property
    def needs(self) -> frozenset[str]:
        off_policy = self.mini_batches * self.epochs > 1
        wanted = {"old_logprobs": off_policy, "ref_logprobs": self.kl_coefficient > 0}
        return frozenset(name for name, needed in wanted.items() if needed)

    def advantages(self, batch: Batch) -> Tensor:
        return to_tokens(group_relative(batch.sequences["rewards"], batch.sequences["group"]), batch)

    def improvement_attributions(self, batch: Batch) -> Tensor:
        relative = group_relative(batch.sequences["rewards"], batch.sequences["group"])
        return to_tokens(group_normalised(relative, batch.sequences["group"]), batch)

    def surrogate(self, outputs: Outputs, batch: Batch) -> Loss:
        return token_surrogate(outputs["logprobs"], batch, self.clip_low, self.clip_high, self.aggregation)

    def loss(self, outputs: Outputs, batch: Batch) -> Loss:
        """surrogate + kl_coefficient KL(pi || ref) - entropy_coefficient H(pi), all aggregated alike."""
        logprobs, loss = outputs["logprobs"], self.surrogate(outputs, batch)
        terms, metrics = dict(loss.terms), dict(loss.metrics)
        if self.kl_coefficient:
            kl = ESTIMATORS[self.kl_estimator](logprobs, batch.tokens["ref_logprobs"].to(logprobs))
            terms["kl_penalty"] = (self.kl_coefficient, aggregate(kl, batch, self.aggregation))
            metrics["kl"] = aggregate(kl.detach(), batch, "token_mean")
        if self.entropy_coefficient:
            terms["entropy_bonus"] = (-self.entropy_coefficient, aggregate(outputs["entropy"], batch, self.aggregation))
        if "old_logprobs" not in batch.tokens:
            metrics |= mismatch_sums(logprobs, batch)
        metrics["entropy"] = aggregate(outputs["entropy"].detach(), batch, "token_mean")
        return Loss(terms, metrics)

    def prepare(self, batch: Batch, state: State) -> Prepared:
        batch = batch.with_tokens(advantages=self.advantages(batch))
        outputs = frozenset({"logprobs", "entropy"})
        update = Update("policy", batch, self.loss, outputs, mini_batches=self.mini_batches, epochs=self.epochs)
        return Prepared([update], state)
