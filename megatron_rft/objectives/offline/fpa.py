"""FPA, future policy approximation (fpa.txt Eq. 3, 4): Off-RL weighted by an extrapolation of the policy.

    loss    = mean over trajectories of -R stopgrad(pi_hat(y|x)^(1/|y|)) (1/|y|) log pi(y|x)
    pi_hat  = softmax((1 + extrapolation) h - extrapolation h_ref)    per token

At extrapolation 0 its gradient is Off-RL's. `fpa_on` correct or incorrect uses pi_hat for those trajectories only; the
others have the weight pi(y|x)^(1/|y|), as in Off-RL.
"""

import torch
from torch import Tensor

from megatron_rft.config.algorithms.offline import fpa as section
from megatron_rft.objectives.base import Outputs, SecondDistribution, sequence_means
from megatron_rft.objectives.offline.base import weights
from megatron_rft.objectives.offline.off_rl import OffRL
from megatron_rft.records import Batch, send


class FPA(OffRL):
    options: section.FPA

    @property
    def outputs(self) -> frozenset[str]:
        return super().outputs | {"extrapolated_logprobs"}

    @property
    def second(self) -> SecondDistribution:
        return SecondDistribution("reference", extrapolation=self.options.extrapolation)

    def objective(self, outputs: Outputs, batch: Batch) -> Tensor:
        logprobs = outputs["logprobs"]
        factor = weights(outputs["extrapolated_logprobs"], batch)
        if self.options.fpa_on != "both":
            ahead = (batch.sequences["rewards"] > 0) == (self.options.fpa_on == "correct")
            factor = torch.where(send(ahead, factor.device), factor, weights(logprobs, batch))
        return factor.detach() * sequence_means(logprobs, batch)
