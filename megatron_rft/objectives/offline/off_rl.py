"""Off-RL (fpa.txt Eq. 1, B.6): raises the length-normalised probability of right trajectories and lowers the others'.

    loss = mean over trajectories of -R pi(y|x)^(1/|y|)   + kl_coefficient KL(pi_ref || pi)

The forward KL is exact over the vocabulary at every token of the data. `kl_aggregation`: summed over a trajectory
(Eq. 31) and averaged over trajectories, or the mean over tokens.
"""

from torch import Tensor

from megatron_rft.config.algorithms.offline import off_rl as section
from megatron_rft.objectives.base import Outputs, SecondDistribution, Sum
from megatron_rft.objectives.offline.base import Offline, over_sequences, weights
from megatron_rft.objectives.surrogates import aggregate
from megatron_rft.records import Batch, like


class OffRL(Offline):
    options: section.OffRL

    @property
    def outputs(self) -> frozenset[str]:
        return frozenset({"logprobs", "forward_kl"} if self.options.kl_coefficient else {"logprobs"})

    @property
    def second(self) -> SecondDistribution | None:
        return SecondDistribution("reference") if self.options.kl_coefficient else None

    def objective(self, outputs: Outputs, batch: Batch) -> Tensor:
        """[B] the quantity that the loss raises for right and lowers for wrong trajectories."""
        return weights(outputs["logprobs"], batch)

    def terms(self, outputs: Outputs, batch: Batch) -> dict[str, tuple[float, Sum]]:
        values = self.objective(outputs, batch)
        found = {"reinforce": (1.0, over_sequences(-like(batch.sequences["rewards"], values) * values, batch))}
        if self.options.kl_coefficient:
            divergence = aggregate(outputs["forward_kl"], batch, self.options.kl_aggregation)
            found["forward_kl"] = (self.options.kl_coefficient, divergence)
        return found
