"""SimPER (arXiv:2502.00883; fpa.txt Eq. 9): compares the inverse perplexities of both sides, without a reference.

    loss = mean over pairs of -(pi(y_w|x)^(1/|y_w|) - pi(y_l|x)^(1/|y_l|))

Its gradient is twice Off-RL's on the same trajectories (fpa.txt A.1), because Off-RL averages over trajectories instead
of pairs.
"""

from torch import Tensor

from megatron_rft.config.algorithms.offline import simper as section
from megatron_rft.objectives.base import Outputs
from megatron_rft.objectives.offline.base import weights
from megatron_rft.objectives.offline.pairs import Pairwise
from megatron_rft.records import Batch


class SimPER(Pairwise):
    options: section.SimPER

    def score(self, outputs: Outputs, batch: Batch) -> Tensor:
        return weights(outputs["logprobs"], batch)

    def pair_loss(self, right: Tensor, wrong: Tensor) -> Tensor:
        return wrong - right
