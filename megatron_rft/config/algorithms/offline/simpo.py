"""SimPO: a margin of length-normalised likelihoods."""

from typing import Literal

from megatron_rft.config.algorithms.offline.base import Pairwise
from megatron_rft.config.sections import NonNegative, Positive


class SimPO(Pairwise):
    name: Literal["simpo"] = "simpo"
    beta: Positive = 2.0
    gamma: NonNegative = 1.0
    """The margin."""
