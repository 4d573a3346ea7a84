"""Environments: what answers the policy between its turns. No torch: a process for environments is small."""

from megatron_rft.environments.base import Environment, Turn
from megatron_rft.responses import Prompt, Score

__all__ = ["Environment", "Prompt", "Score", "Turn"]
