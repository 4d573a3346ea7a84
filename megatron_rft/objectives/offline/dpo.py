"""DPO (arXiv:2305.18290 Eq. 7; fpa.txt B.2), with r(y) = log pi(y|x) - log pi_ref(y|x):

loss = mean over pairs of -log sigmoid(beta (r(y_w) - r(y_l)))
"""

from torch import Tensor
from torch.nn.functional import logsigmoid

from megatron_rft.config.algorithms.offline import dpo as section
from megatron_rft.objectives.offline.pairs import Pairwise


class DPO(Pairwise):
    options: section.DPO

    def pair_loss(self, right: Tensor, wrong: Tensor) -> Tensor:
        return -logsigmoid(self.options.beta * (right - wrong))
