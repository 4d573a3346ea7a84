"""FPA: Off-RL weighted by an extrapolation of the policy."""

from typing import Literal

from megatron_rft.config.algorithms.offline.off_rl import OffRL
from megatron_rft.config.sections import NonNegative


class FPA(OffRL):
    name: Literal["fpa"] = "fpa"
    extrapolation: NonNegative = 1.0
    """lambda: how far the policy is extrapolated away from the reference. 0 is Off-RL."""
    fpa_on: Literal["both", "correct", "incorrect"] = "both"
    """Trajectories weighted by the extrapolated policy; the others are weighted by the current one."""

    @property
    def compares_distributions(self) -> bool:
        return True
