"""IPO: the margin of log-ratios is pulled to a finite value."""

from typing import Literal

from megatron_rft.config.algorithms.offline.base import Pairwise
from megatron_rft.config.sections import Positive


class IPO(Pairwise):
    name: Literal["ipo"] = "ipo"
    beta: Positive = 0.1
    """The margin of log-ratios is pulled to 1 / (2 beta)."""
    length_normalised: bool = True
    """Log-ratios per token in the mean; false: their sums, as in the paper."""
