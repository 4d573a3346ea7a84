"""RPO (arXiv:2404.19733 Eq. 1; fpa.txt B.2): DPO plus the length-normalised likelihood of the right trajectory.

loss = DPO + alpha mean over pairs of -(1/|y_w|) log pi(y_w|x)
"""

from megatron_rft.config.algorithms.offline import rpo as section
from megatron_rft.objectives.base import Outputs, Sum
from megatron_rft.objectives.offline.dpo import DPO
from megatron_rft.objectives.offline.pairs import mean_logprobs, split_pairs
from megatron_rft.records import Batch


class RPO(DPO):
    options: section.RPO

    def terms(self, outputs: Outputs, batch: Batch) -> dict[str, tuple[float, Sum]]:
        right, _ = split_pairs(mean_logprobs(outputs, batch), batch)
        return super().terms(outputs, batch) | {"nll": (self.options.alpha, Sum(-right.sum(), "units"))}
