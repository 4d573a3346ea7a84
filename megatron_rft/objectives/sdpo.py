"""SDPO: self-distillation from a teacher that reads feedback (pipo.txt 2, Eq. 4, A.2; arXiv:2601.20802).

    loss = mean over tokens of KL( pi(. | q, y_<t)  ||  stopgrad pi(. | q, f, y_<t) )

The KL is exact over the vocabulary. `importance_cap` c multiplies each token's KL by min(pi / pi_old, c), without a
gradient. The teacher has the policy's weights (or a moving average of them) and reads the feedback f from the batch's
contexts. Responses without feedback are not trained on. For PIPO, a token's attribution is the teacher's log-prob less
the policy's: log q(y_t | q, f, y_<t) - log pi(y_t | q, y_<t); PIPO's clipped step on it is a policy gradient.
"""

import torch
from torch import Tensor

from megatron_rft.config.algorithms import online as section
from megatron_rft.objectives.base import Loss, Outputs, PolicyObjective, Prepared, SecondDistribution, State
from megatron_rft.objectives.surrogates import aggregate, clipped_surrogate, log_ratio, mismatch_sums, surrogate_loss
from megatron_rft.records import Batch, like

OUTPUTS = frozenset({"logprobs", "entropy", "other_logprobs", "reverse_kl"})


class SDPO(PolicyObjective):
    options: section.SDPO

    attribution_needs = frozenset({"old_logprobs", "teacher_logprobs"})

    def advantages(self, batch: Batch) -> Tensor:
        """[R] the attribution; 0 in responses without feedback."""
        informed = self.trained(batch)[batch.sequence_ids]
        return torch.where(informed, batch.tokens["teacher_logprobs"] - batch.tokens["old_logprobs"], 0.0)

    @property
    def needs(self) -> frozenset[str]:
        several = self.setting.mini_batches * self.options.epochs > 1
        return frozenset({"old_logprobs"} if self.options.importance_cap and several else ())

    def trained(self, batch: Batch) -> Tensor:
        """Sequences with feedback."""
        assert batch.context_lens is not None, "a batch without contexts"
        return batch.context_lens > 0

    def surrogate(self, outputs: Outputs, batch: Batch) -> Loss:
        logprobs = outputs["logprobs"]
        advantages = like(batch.tokens["advantages"], logprobs)
        options = self.options
        result = clipped_surrogate(log_ratio(logprobs, batch), advantages, options.clip_low, options.clip_high)
        return surrogate_loss(result, batch, options.aggregation, self.setting.max_response_tokens)

    def loss(self, outputs: Outputs, batch: Batch) -> Loss:
        logprobs = outputs["logprobs"].detach()
        metrics = {
            "entropy": aggregate(outputs["entropy"].detach(), batch, "token_mean"),
            "teacher_advantage": aggregate(outputs["other_logprobs"] - logprobs, batch, "token_mean"),
        }
        if "old_logprobs" not in batch.tokens and self.setting.mini_batches * self.options.epochs == 1:
            metrics |= mismatch_sums(logprobs, batch)
        divergence = outputs["reverse_kl"]
        if self.options.importance_cap:
            weights = log_ratio(logprobs, batch).exp().clamp(max=self.options.importance_cap)
            divergence = divergence * weights
            metrics["importance_mean"] = aggregate(weights, batch, "token_mean")
        distance = aggregate(divergence, batch, self.options.aggregation, self.setting.max_response_tokens)
        return Loss({"distillation": (1.0, distance)}, metrics)

    def prepare(self, batch: Batch, state: State) -> Prepared:
        informed = self.trained(batch)
        second = SecondDistribution("teacher" if self.options.teacher_rate else "actor", in_context=True)
        update = self.update("policy", batch.select(informed), self.loss, OUTPUTS, second=second)
        share = informed.float().mean().item() if len(batch) else 0.0
        return Prepared([update], state, {"sdpo/informed": share})
