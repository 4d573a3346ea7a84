"""Rejection fine-tuning: supervised fine-tuning on the right trajectories."""

from typing import Literal

from megatron_rft.config.algorithms.offline.base import Offline


class RFT(Offline):
    name: Literal["rft"] = "rft"
