"""Verifiers: from a problem and a response to a reward."""

from megatron_rft.rewards.base import Reward
from megatron_rft.rewards.registry import build
