"""GRPO, and methods that centre or scale a response's advantage in another way."""

from megatron_rft.config.algorithms import online as section
from megatron_rft.objectives.advantages import group_centred, group_relative, leave_one_out
from megatron_rft.objectives.policy_gradient import GroupRelative


class GRPO(GroupRelative):
    """A_i = (R_i - mean) / std of the group, a clipped token ratio, KL to the reference in the loss (pipo.txt Eq. 3,
    A.2)."""

    options: section.GRPO
    relative = staticmethod(group_relative)


class DrGRPO(GroupRelative):
    """GRPO without division by the std, which favours easy and hard problems, and without division by the response's
    length, which favours long wrong answers (arXiv:2503.20783)."""

    options: section.DrGRPO
    relative = staticmethod(group_centred)


class RLOO(GroupRelative):
    """A response's baseline is the mean reward of the others; the KL is in the reward (arXiv:2402.14740)."""

    options: section.RLOO
    relative = centred = staticmethod(leave_one_out)
