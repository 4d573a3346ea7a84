"""GRPO, and methods that centre or scale a response's advantage in another way."""

from typing import ClassVar, Literal

from megatron_rft.config.algorithms.base import Aggregation, Clipped, KLEstimator, KLPlace
from megatron_rft.config.sections import NonNegative


class GRPO(Clipped):
    name: Literal["grpo"] = "grpo"
    compares_responses: ClassVar[bool] = True


class DrGRPO(GRPO):
    name: Literal["dr_grpo"] = "dr_grpo"
    aggregation: Aggregation = "constant"
    kl_coefficient: NonNegative = 0.0


class RLOO(GRPO):
    name: Literal["rloo"] = "rloo"
    aggregation: Aggregation = "sequence_sum"
    kl_estimator: KLEstimator = "k1"
    kl_in: KLPlace = "reward"
