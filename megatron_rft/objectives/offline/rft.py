"""Rejection fine-tuning (arXiv:2308.01825; fpa.txt B.2): supervised fine-tuning on the right trajectories.

loss = mean over tokens of -log pi(y_t | x, y_<t)
"""

from megatron_rft.config.algorithms.offline import rft as section
from megatron_rft.objectives.base import Outputs, Sum
from megatron_rft.objectives.offline.base import Offline
from megatron_rft.objectives.surrogates import aggregate
from megatron_rft.records import Batch


class RFT(Offline):
    options: section.RFT

    def examples(self, data: Batch) -> list[tuple[int, ...]]:
        return [(position,) for position, reward in enumerate(data.sequences["rewards"].tolist()) if reward > 0]

    def terms(self, outputs: Outputs, batch: Batch) -> dict[str, tuple[float, Sum]]:
        return {"nll": (1.0, aggregate(-outputs["logprobs"], batch, "token_mean"))}
