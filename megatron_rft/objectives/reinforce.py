"""REINFORCE++: no critic and no group; returns of tokens, whitened over the whole batch (arXiv:2501.03262)."""

from torch import Tensor

from megatron_rft.config.algorithms import reinforce as section
from megatron_rft.objectives.advantages import at_last_token, group_centred, rewards_to_go, to_tokens, whiten
from megatron_rft.objectives.policy_gradient import PolicyGradient
from megatron_rft.records import Batch


class ReinforcePlusPlus(PolicyGradient):
    """A_t = whitened sum_{k >= t} gamma^(k - t) r_k; r is the verifier's on the last token, the KL's on each."""

    options: section.ReinforcePlusPlus

    def advantages(self, batch: Batch) -> Tensor:
        rewards = at_last_token(batch.shaped_rewards, batch) - self.token_penalty(batch)
        return whiten(rewards_to_go(rewards, batch, self.options.gamma), batch.response_mask)


class ReinforcePlusPlusBaseline(PolicyGradient):
    """The mean of the group is the baseline, the batch's spread the scale: A_t = whitened (R_i - mean); KL by k2 in the
    loss."""

    options: section.ReinforcePlusPlusBaseline

    def advantages(self, batch: Batch) -> Tensor:
        return whiten(to_tokens(group_centred(self.rewards(batch), batch.groups), batch), batch.response_mask)
