"""IPO (arXiv:2310.12036 Eq. 17): regression of the margin between log-ratios to 1 / (2 beta).

    loss = mean over pairs of (r(y_w) - r(y_l) - 1 / (2 beta))^2

r is the mean log-ratio per token, as the authors advise and common implementations have it; with
length_normalised=False it is the paper's sum.
"""

from torch import Tensor

from megatron_rft.config.algorithms.offline import ipo as section
from megatron_rft.objectives.base import Outputs, sequence_means
from megatron_rft.objectives.offline.pairs import Pairwise
from megatron_rft.records import Batch, like


class IPO(Pairwise):
    options: section.IPO

    def score(self, outputs: Outputs, batch: Batch) -> Tensor:
        if not self.options.length_normalised:
            return super().score(outputs, batch)
        logprobs = outputs["logprobs"]
        return sequence_means(logprobs - like(batch.tokens["ref_logprobs"], logprobs), batch)

    def pair_loss(self, right: Tensor, wrong: Tensor) -> Tensor:
        return (right - wrong - 1 / (2 * self.options.beta)) ** 2
