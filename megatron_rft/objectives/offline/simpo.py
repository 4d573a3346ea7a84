"""SimPO (arXiv:2405.14734 Eq. 6): preference by length-normalised likelihood, with a margin and without a reference.

loss = mean over pairs of -log sigmoid(beta/|y_w| log pi(y_w|x) - beta/|y_l| log pi(y_l|x) - gamma)
"""

from torch import Tensor
from torch.nn.functional import logsigmoid

from megatron_rft.config.algorithms.offline import simpo as section
from megatron_rft.objectives.offline.pairs import Pairwise, mean_logprobs


class SimPO(Pairwise):
    options: section.SimPO
    score = staticmethod(mean_logprobs)

    def pair_loss(self, right: Tensor, wrong: Tensor) -> Tensor:
        return -logsigmoid(self.options.beta * (right - wrong) - self.options.gamma)
