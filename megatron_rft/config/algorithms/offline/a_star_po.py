"""A*-PO: regression of the log-ratio on the advantage."""

from typing import Literal

from megatron_rft.config.algorithms.offline.base import Offline
from megatron_rft.config.sections import Positive


class AStarPO(Offline):
    name: Literal["a_star_po"] = "a_star_po"
    beta1: Positive = 0.5
    """Temperature of the optimal value's estimate."""
    beta2: Positive = 1e-3
    """Factor of the log-ratio."""
