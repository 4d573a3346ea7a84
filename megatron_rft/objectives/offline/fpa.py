"""Off-RL and FPA: the trajectories' own probabilities as weights of their likelihoods."""

import torch
from torch import Tensor

from megatron_rft.config.algorithms import offline as section
from megatron_rft.objectives.base import Outputs, SecondDistribution, Sum, sequence_means
from megatron_rft.objectives.offline.base import Offline, over_sequences, weights
from megatron_rft.objectives.surrogates import aggregate
from megatron_rft.records import Batch, like, send


class OffRL(Offline):
    """Off-RL (fpa.txt Eq. 1, B.6): the length-normalised probability of right trajectories up, the others' down.

        loss = mean over trajectories of -R pi(y|x)^(1/|y|)   + kl_coefficient KL(pi_ref || pi)

    The forward KL is exact over the vocabulary at every token of the data. `kl_aggregation`: summed over a trajectory
    (Eq. 31) and averaged over trajectories, or the mean over tokens.
    """

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
        terms = {"reinforce": (1.0, over_sequences(-like(batch.sequences["rewards"], values) * values, batch))}
        if self.options.kl_coefficient:
            divergence = aggregate(outputs["forward_kl"], batch, self.options.kl_aggregation)
            terms["forward_kl"] = (self.options.kl_coefficient, divergence)
        return terms


class FPA(OffRL):
    """FPA, future policy approximation (fpa.txt Eq. 3, 4): Off-RL weighted by an extrapolation of the policy.

        loss    = mean over trajectories of -R stopgrad(pi_hat(y|x)^(1/|y|)) (1/|y|) log pi(y|x)
        pi_hat  = softmax((1 + extrapolation) h - extrapolation h_ref)    per token

    At extrapolation 0 its gradient is Off-RL's. `fpa_on` correct or incorrect uses pi_hat for those trajectories only;
    the others have the weight pi(y|x)^(1/|y|), as in Off-RL.
    """

    options: section.FPA

    @property
    def outputs(self) -> frozenset[str]:
        return super().outputs | {"extrapolated_logprobs"}

    @property
    def second(self) -> SecondDistribution:
        return SecondDistribution("reference", extrapolation=self.options.extrapolation)

    def objective(self, outputs: Outputs, batch: Batch) -> Tensor:
        logprobs = outputs["logprobs"]
        factor = weights(outputs["extrapolated_logprobs"], batch)
        if self.options.fpa_on != "both":
            ahead = (batch.sequences["rewards"] > 0) == (self.options.fpa_on == "correct")
            factor = torch.where(send(ahead, factor.device), factor, weights(logprobs, batch))
        return factor.detach() * sequence_means(logprobs, batch)
