"""Distillation on the student's own samples (arXiv:2306.13649, arXiv:2306.08543).

    loss = mean over tokens of D( p_S(. | y_<t), p_T(. | y_<t) ),   y sampled from p_S

    reverse_kl   KL(p_S || p_T)
    forward_kl   KL(p_T || p_S)
    jsd          beta KL(p_T || M) + (1 - beta) KL(p_S || M),   M = beta p_T + (1 - beta) p_S

D is exact over the vocabulary, at the student's temperature. Its gradient passes through p_S alone, not through the
sampling of y. Tokens that the student did not write have mask 0 and do not count. No reward is used.
"""

from megatron_rft.config.algorithms import online as section
from megatron_rft.config.algorithms.offline import OfflineDistillation
from megatron_rft.config.plugins import Teaching
from megatron_rft.objectives.base import Loss, Objective, Outputs, Prepared, SecondDistribution, State, Sum
from megatron_rft.objectives.offline.base import Offline
from megatron_rft.objectives.surrogates import aggregate, mismatch_sums
from megatron_rft.records import Batch


def needed(options: Teaching) -> frozenset[str]:
    """The model's outputs that `divergence` reads."""
    return frozenset({"logprobs", "other_logprobs", options.divergence})


def second(options: Teaching) -> SecondDistribution:
    return SecondDistribution("distil", mixture=options.jsd_beta)


def divergence(outputs: Outputs, batch: Batch, options: Teaching) -> tuple[Sum, dict[str, Sum]]:
    """The mean of D over tokens, and metrics: the teacher's log-prob of the sampled token less the student's."""
    ahead = outputs["other_logprobs"] - outputs["logprobs"].detach()
    metrics = {"teacher_advantage": aggregate(ahead, batch, "token_mean")}
    return aggregate(outputs[options.divergence], batch, "token_mean"), metrics


class Distil(Objective):
    options: section.Distillation

    def loss(self, outputs: Outputs, batch: Batch) -> Loss:
        distance, metrics = divergence(outputs, batch, self.options)
        metrics["entropy"] = aggregate(outputs["entropy"].detach(), batch, "token_mean")
        if self.setting.mini_batches * self.options.epochs == 1:
            metrics |= mismatch_sums(outputs["logprobs"].detach(), batch)
        return Loss({"distillation": (1.0, distance)}, metrics)

    def prepare(self, batch: Batch, state: State) -> Prepared:
        outputs = needed(self.options) | {"entropy"}
        return Prepared([self.update("policy", batch, self.loss, outputs, second=second(self.options))], state)


class OfflineDistil(Offline):
    """The same loss on stored trajectories, tokens that another policy sampled."""

    options: OfflineDistillation

    @property
    def outputs(self) -> frozenset[str]:
        return needed(self.options)

    @property
    def second(self) -> SecondDistribution:
        return second(self.options)

    def terms(self, outputs: Outputs, batch: Batch) -> dict[str, tuple[float, Sum]]:
        return {"distillation": (1.0, divergence(outputs, batch, self.options)[0])}

    def loss(self, outputs: Outputs, batch: Batch) -> Loss:
        whole = super().loss(outputs, batch)
        return Loss(whole.terms, whole.metrics | divergence(outputs, batch, self.options)[1])
