"""A*-PO with its second stage offline (arXiv:2505.20686; fpa.txt B.2): regression of the log-ratio on the advantage.

V(x) = beta1 log mean_i exp(R_i / beta1)                                 over all responses to x, computed once
loss = mean over trajectories of (beta2 log(pi(y|x) / pi_ref(y|x)) - (R - V(x)))^2
"""

import torch
from torch import Tensor

from megatron_rft.config.algorithms import offline as section
from megatron_rft.objectives.base import Outputs, Sum
from megatron_rft.objectives.offline.base import Offline, log_ratios, over_sequences
from megatron_rft.records import Batch, like


def optimal_values(rewards: Tensor, groups: Tensor, beta: float) -> Tensor:
    """[B] V of each trajectory's problem: the mean reward in the limit of a large beta, the best in that of a small."""
    distinct, group = groups.unique(return_inverse=True)
    scaled = rewards.double() / beta
    top = torch.full((len(distinct),), -torch.inf, dtype=torch.float64).scatter_reduce(0, group, scaled, "amax")
    total = torch.zeros_like(top).index_add(0, group, (scaled - top[group]).expm1())
    values = beta * (top + (total / group.bincount()).log1p())
    return values[group].float()


class AStarPO(Offline):
    options: section.AStarPO

    def annotate(self, data: Batch) -> Batch:
        return data.with_sequences(value=optimal_values(data.sequences["rewards"], data.groups, self.options.beta1))

    def terms(self, outputs: Outputs, batch: Batch) -> dict[str, tuple[float, Sum]]:
        ratios = log_ratios(outputs["logprobs"], batch)
        advantages = like(batch.sequences["rewards"] - batch.sequences["value"], ratios)
        return {"regression": (1.0, over_sequences((self.options.beta2 * ratios - advantages) ** 2, batch))}
