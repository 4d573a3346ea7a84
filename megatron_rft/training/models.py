"""The networks of a run: the actor, and those that its objective needs.

A reference and a teacher use the actor's modules; their weights are in host memory.
"""

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rft.inference import weight_sync
from megatron_rft.inference.engine import Engine
from megatron_rft.megatron.actor import Actor
from megatron_rft.megatron.ema import MovingAverage
from megatron_rft.megatron.second_distribution import Recorded, Second
from megatron_rft.objectives.base import SecondDistribution, Update
from megatron_rft.objectives.kl import k3
from megatron_rft.objectives.plugins.dynamic import has_pairs, on_response_tokens, pairs
from megatron_rft.records import Batch
from megatron_rft.training.grad_norms import GradientNorms, due

LOGPROBS, VALUES = frozenset({"logprobs"}), frozenset({"values"})


@dataclass
class Models:
    """The actor alone, for objectives that need no other network."""

    actor: Actor
    needs: frozenset[str] = frozenset()  # Objective.needs
    norms: GradientNorms | None = None

    @property
    def trained(self) -> dict[str, Actor]:
        """The networks with an optimizer, by the names of `Update.model`."""
        return {"actor": self.actor}

    @property
    def averages(self) -> dict[str, MovingAverage]:
        return {}

    def outputs(self, batch: Batch) -> Batch:
        """The batch with the model outputs that the objective needs, from forward passes without gradients."""
        if "old_logprobs" in self.needs and "old_logprobs" not in batch.tokens:
            batch = batch.with_tokens(old_logprobs=self.actor.outputs(batch, LOGPROBS)["logprobs"])
        return batch

    def measure(self, batch: Batch, step: int) -> dict[str, float]:
        """Metrics of the batch before the step, if any are due."""
        return {}

    def second(self, update: Update, mini_batch: Batch) -> Second | Recorded | None:
        """The second distribution that `update` compares with."""
        assert update.second is None, update.second
        return None

    def end_of_step(self) -> None: ...


@dataclass
class OnlineModels(Models):
    """The actor, and a critic, a reference and a moving-average teacher if the objective needs them, else None."""

    critic: Actor | None = None
    reference: list[Tensor] | None = None
    teacher: MovingAverage | None = None
    old_logprobs: str = "recompute"  # algorithm.old_logprobs
    kl_every: int = 0  # constraint.kl_every

    @property
    def trained(self) -> dict[str, Actor]:
        return super().trained | ({"critic": self.critic} if self.critic else {})

    @property
    def averages(self) -> dict[str, MovingAverage]:
        return {"teacher": self.teacher} if self.teacher else {}

    def outputs(self, batch: Batch) -> Batch:
        if self.old_logprobs == "rollout":
            batch = batch.with_tokens(old_logprobs=batch.tokens["rollout_logprobs"])
        batch = super().outputs(batch)
        if "ref_kl" in self.needs:
            second = Second(batch, self.reference)
            batch = batch.with_tokens(ref_kl=self.actor.outputs(batch, frozenset({"reverse_kl"}), second)["reverse_kl"])
        if "ref_logprobs" in self.needs:
            batch = batch.with_tokens(ref_logprobs=self.reference_logprobs(batch))
        if "refined_logprobs" in self.needs:
            found = self.actor.outputs(pairs(batch), LOGPROBS)["logprobs"] if has_pairs(batch) else torch.zeros(0)
            batch = batch.with_tokens(refined_logprobs=on_response_tokens(found, batch))
        if "teacher_logprobs" in self.needs:
            batch = batch.with_tokens(teacher_logprobs=self._teacher_logprobs(batch))
        if self.critic:
            batch = batch.with_tokens(values=self.critic.outputs(batch, VALUES)["values"])
        return batch

    def measure(self, batch: Batch, step: int) -> dict[str, float]:
        """KL(policy || reference) before the step, by the k3 estimate on the sampled tokens."""
        if not due(self.kl_every, step):
            return {}
        logprobs = batch.tokens.get("old_logprobs", batch.tokens["rollout_logprobs"])
        values = k3(logprobs.double(), self.reference_logprobs(batch).double())
        mask = batch.response_mask.double()
        return {"constraint/kl": (values * mask).sum().item() / max(mask.sum().item(), 1.0)}

    def reference_logprobs(self, batch: Batch) -> Tensor:
        """[R] log-probs of the response tokens under the reference."""
        with self.actor.use_weights(self.reference):
            return self.actor.outputs(batch, LOGPROBS)["logprobs"]

    def push_reference(self, engine: Engine) -> None:
        """Send the reference's weights to the refiner's engine."""
        with self.actor.use_weights(self.reference):
            weight_sync.push(self.actor.stream(), engine, version=0, verify=True)

    def _teacher_logprobs(self, batch: Batch) -> Tensor:
        with self.actor.use_weights(self.teacher.weights) if self.teacher else nullcontext():
            return self.actor.outputs(batch.in_context(), LOGPROBS)["logprobs"]

    def second(self, update: Update, mini_batch: Batch) -> Second | None:
        if update.second is None:
            return None
        return Second(
            mini_batch.in_context() if update.second.in_context else mini_batch,
            self._weights(update.second),
            update.second.extrapolation,
        )

    def _weights(self, second: SecondDistribution) -> list[Tensor] | None:
        if second.weights == "reference":
            return self.reference
        if second.weights == "teacher":
            return self.teacher.weights
        assert second.weights == "actor", second.weights
        return None

    def end_of_step(self) -> None:
        if self.teacher:
            self.teacher.update()
