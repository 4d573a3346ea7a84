"""IPO: regression of the margin between log-ratios to a finite value."""

from typing import Literal

from megatron_rft.config.algorithms.offline.base import Pairwise
from megatron_rft.config.sections import Positive


class IPO(Pairwise):
    name: Literal["ipo"] = "ipo"
    beta: Positive = 0.1
    """The target of the margin is 1 / (2 beta)."""
    length_normalised: bool = True
    """true: mean log-ratio per token. false: the sum over tokens, as in the paper."""
