"""GSPO: one importance ratio per response."""

from typing import Literal

from megatron_rft.config.algorithms.grpo import GRPO
from megatron_rft.config.sections import Positive, ShareOrAll


class GSPO(GRPO):
    name: Literal["gspo"] = "gspo"
    clip_low: ShareOrAll = 3e-4
    clip_high: Positive = 4e-4
