"""CISPO clips the ratio instead of its product with the advantage, so every token keeps its gradient.

term_t = -sg(clip(r_t, 1 - low, 1 + high)) A_t log pi_t          (arXiv:2506.13585 Eq. 4, 5)
"""

from megatron_rft.config.algorithms import online as section
from megatron_rft.objectives.base import Loss, Outputs
from megatron_rft.objectives.grpo import GRPO
from megatron_rft.objectives.surrogates import LOG_RATIO_BOUND, Clipped, log_ratio
from megatron_rft.records import Batch, like


class CISPO(GRPO):
    options: section.CISPO

    def surrogate(self, outputs: Outputs, batch: Batch) -> Loss:
        logprobs = outputs["logprobs"]
        ratio = log_ratio(logprobs, batch).detach().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
        weight = ratio.clamp(1 - self.options.clip_low, 1 + self.options.clip_high)
        terms = -weight * like(batch.tokens["advantages"], logprobs) * logprobs
        result = Clipped(terms, ratio, (weight != ratio).to(ratio))
        return self.aggregated(result, batch)
