"""REINFORCE++: token returns whitened over the whole batch, without a critic or groups (arXiv:2501.03262)."""

from torch import Tensor

from megatron_rft.config.algorithms import online as section
from megatron_rft.objectives import advantages
from megatron_rft.objectives.policy_gradient import PolicyGradient
from megatron_rft.records import Batch


class ReinforcePlusPlus(PolicyGradient):
    """A_t = whitened sum_{k >= t} gamma^(k - t) r_k; r is the verifier's reward on the last token less each token's KL
    penalty, and in episodes each turn's reward on the turn's last token."""

    options: section.ReinforcePlusPlus

    def advantages(self, batch: Batch) -> Tensor:
        rewards = advantages.without_turns(batch.shaped_rewards, batch)
        rewards = advantages.at_turn_ends(rewards, batch) - self.token_penalty(batch)
        return advantages.whiten(advantages.rewards_to_go(rewards, batch, self.options.gamma), batch.response_mask)


class ReinforcePlusPlusBaseline(PolicyGradient):
    """A_t = whitened (R_i - mean): the group's mean is the baseline, the batch's std the scale; k2 KL in the loss."""

    options: section.ReinforcePlusPlusBaseline

    def advantages(self, batch: Batch) -> Tensor:
        credit = advantages.group_centred(self.rewards(batch) - self.penalties(batch), batch.groups)
        return advantages.whiten(advantages.to_tokens(credit, batch), batch.response_mask)
