"""GSPO: GRPO with one importance ratio per response, the geometric mean of its tokens' ratios (pipo.txt A.2).

    r_i = exp(mean_t log r_it),   term_i = -min(r_i A_i, clip(r_i, 1 - low, 1 + high) A_i)

Each token gets the term of its response. The default aggregation, the mean over sequences, is the paper's; the others
weight responses by their length.
"""

from torch import Tensor

from megatron_rft.config.algorithms import online as section
from megatron_rft.objectives.grpo import GRPO
from megatron_rft.objectives.surrogates import Clipped, sequence_log_ratio
from megatron_rft.records import Batch


class GSPO(GRPO):
    options: section.GSPO

    def clip(self, log_ratio: Tensor, batch: Batch, advantages: Tensor) -> Clipped:
        return super().clip(sequence_log_ratio(log_ratio, batch), batch, advantages)
