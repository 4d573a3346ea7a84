"""RPO: DPO plus the likelihood of the right trajectory."""

from typing import Literal

from megatron_rft.config.algorithms.offline.dpo import DPO
from megatron_rft.config.sections import NonNegative


class RPO(DPO):
    name: Literal["rpo"] = "rpo"
    alpha: NonNegative = 1.0
    """Factor of the right trajectory's likelihood."""
