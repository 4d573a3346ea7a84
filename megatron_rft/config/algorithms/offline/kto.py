"""KTO: compares each trajectory with the mean log-ratio."""

from typing import Literal

from megatron_rft.config.algorithms.offline.base import Offline
from megatron_rft.config.sections import NonNegative, Positive


class KTO(Offline):
    name: Literal["kto"] = "kto"
    beta: Positive = 0.1
    weight_correct: NonNegative = 1.0
    weight_incorrect: NonNegative = 1.0
