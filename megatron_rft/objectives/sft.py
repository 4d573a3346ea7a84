"""Supervised fine-tuning: the mean negative log-likelihood of response tokens. The warm start of an RL run."""

from megatron_rft.config.algorithms import offline as section
from megatron_rft.objectives.base import Loss, Objective, Outputs, Prepared, State, Sum, Update
from megatron_rft.objectives.offline.base import Offline
from megatron_rft.objectives.surrogates import aggregate
from megatron_rft.records import Batch


class SFT(Objective):
    options: section.SFT

    def loss(self, outputs: Outputs, batch: Batch) -> Loss:
        return Loss({"nll": (1.0, aggregate(-outputs["logprobs"], batch, "token_mean"))})

    def prepare(self, batch: Batch, state: State) -> Prepared:
        return Prepared([Update("policy", batch, self.loss)], state)


class RFT(Offline):
    """Rejection fine-tuning (arXiv:2308.01825; fpa.txt B.2): supervised fine-tuning on the right trajectories.

    loss = mean over tokens of -log pi(y_t | x, y_<t)
    """

    options: section.RFT

    def examples(self, data: Batch) -> list[tuple[int, ...]]:
        return [(position,) for position, reward in enumerate(data.sequences["rewards"].tolist()) if reward > 0]

    def terms(self, outputs: Outputs, batch: Batch) -> dict[str, tuple[float, Sum]]:
        return {"nll": (1.0, aggregate(-outputs["logprobs"], batch, "token_mean"))}
