"""DPO: the margin between the log-ratios of a right and a wrong trajectory."""

from typing import Literal

from megatron_rft.config.algorithms.offline.base import Pairwise
from megatron_rft.config.sections import Positive


class DPO(Pairwise):
    name: Literal["dpo"] = "dpo"
    beta: Positive = 0.1
    """Strength of the method's implicit KL to the reference."""
