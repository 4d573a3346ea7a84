"""REINFORCE++, with token returns or with the group's mean as baseline."""

from typing import ClassVar, Literal

from megatron_rft.config.algorithms.base import Aggregation, Clipped, KLEstimator, KLPlace
from megatron_rft.config.sections import ShareOrAll


class ReinforcePlusPlus(Clipped):
    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    aggregation: Aggregation = "token_mean"
    kl_estimator: KLEstimator = "k1"
    kl_in: KLPlace = "reward"
    gamma: ShareOrAll = 1.0
    """Discount per token."""


class ReinforcePlusPlusBaseline(Clipped):
    name: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"
    compares_responses: ClassVar[bool] = True
    aggregation: Aggregation = "token_mean"
    kl_estimator: KLEstimator = "k2"
