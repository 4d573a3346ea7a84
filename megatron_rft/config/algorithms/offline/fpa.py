"""FPA: Off-RL, weighted by where the policy is headed."""

from typing import Literal

from megatron_rft.config.algorithms.offline.off_rl import OffRL
from megatron_rft.config.sections import NonNegative


class FPA(OffRL):
    name: Literal["fpa"] = "fpa"
    extrapolation: NonNegative = 1.0
    """lambda: how far ahead the policy is predicted, beyond where it is from the reference. 0 is Off-RL."""
    fpa_on: Literal["both", "correct", "incorrect"] = "both"
    """Trajectories that are weighted by the predicted policy; the others by the present one."""

    @property
    def compares_distributions(self) -> bool:
        return True
