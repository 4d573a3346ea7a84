"""CISPO: clips the ratio instead of its product with the advantage."""

from typing import ClassVar, Literal

from megatron_rft.config.algorithms.base import Aggregation, PolicyGradient
from megatron_rft.config.sections import NonNegative, Positive, ShareOrAll


class CISPO(PolicyGradient):
    name: Literal["cispo"] = "cispo"
    compares_responses: ClassVar[bool] = True
    clip_low: ShareOrAll = 1.0
    clip_high: Positive = 4.0
    aggregation: Aggregation = "token_mean"
    kl_coefficient: NonNegative = 0.0
