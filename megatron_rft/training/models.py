"""The networks of a run: the actor, and those that its objective needs.

A reference and an averaged teacher use the actor's modules; their weights are in host memory. The teacher of a
distillation is a model of its own.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_rft.megatron.actor import Actor
from megatron_rft.megatron.ema import MovingAverage
from megatron_rft.megatron.two_distributions import Second
from megatron_rft.objectives.base import State, Update
from megatron_rft.objectives.plugins.dynamic import has_pairs, on_response_tokens, pairs
from megatron_rft.objectives.plugins.pipo import PIPO
from megatron_rft.objectives.surrogates import k3
from megatron_rft.records import Batch
from megatron_rft.tracking.throughput import Phases
from megatron_rft.training.monitor import due

Numbers = dict[str, float]  # by name


@dataclass
class EarlyVerification:
    """PIPO's verification while engines in other processes generate the next batch and the trainer would wait.

    For phi > 0 its gradient, apart from the scale, depends on the previous batch and the current weights alone
    (objectives/plugins/pipo.py). It stays in the gradient buffers, which nothing else uses before the step's first
    optimizer step, before it is known whether the step makes the verification.
    """

    objective: PIPO
    actor: Actor
    update: Update | None = None
    metrics: Numbers | None = None  # of the gradient of `update`

    def compute(self, state: State, skip: bool, phase: AbstractContextManager) -> None:
        """Compute the gradient if there may be a verification. `skip`: leave out sequences without a gradient."""
        self.update = self.objective.foreseen(state)
        if self.update is not None:
            (mini_batch,) = self.update.steps()
            batch, counts = self.update.computed(mini_batch, skip)
            with phase:
                self.metrics = self.actor.backward(batch, self.update.loss, counts, self.update.outputs)

    def take(self, update: Update) -> Numbers | None:
        """The metrics of the gradient if it is that of the step's first update, `update`; else None."""
        computed, self.update = self.update, None
        return self.metrics if computed is not None and same(computed.batch, update.batch) else None


def same(one: Batch, other: Batch) -> bool:
    """Whether all values are equal: phi < 0 has other advantages, and a stale batch verifies an older update."""
    values, others = one.state_dict(), other.state_dict()
    return values.keys() == others.keys() and all(torch.equal(values[name], others[name]) for name in values)


LOGPROBS, VALUES = frozenset({"logprobs"}), frozenset({"values"})


@dataclass
class Models:
    """The actor, and the other networks that the objective needs; None: it does not."""

    actor: Actor
    needs: frozenset[str] = frozenset()  # Objective.needs
    verification: EarlyVerification | None = None  # PIPO's
    given: Any = None  # what has the second distributions: a distillation's teachers, or an offline run's reference
    critic: Actor | None = None
    reference: list[Tensor] | None = None
    teacher: MovingAverage | None = None
    old_logprobs: str = "recompute"  # algorithm.old_logprobs
    kl_every: int = 0  # constraint.kl_every
    norms_every: int = 0  # steps between measurements of the gradient norms of `Update.parts`

    @property
    def trained(self) -> dict[str, Actor]:
        """The networks with an optimizer, by the names of `Update.model`."""
        return {"actor": self.actor} | ({"critic": self.critic} if self.critic else {})

    @property
    def averages(self) -> dict[str, MovingAverage]:
        return {"teacher": self.teacher} if self.teacher else {}

    def see(self, source: Any) -> None:
        """Let all networks compute prompts with images. `source`: as of `Actor.see`."""
        for actor in (*self.trained.values(), *getattr(self.given, "actors", ())):
            actor.see(source)

    def outputs(self, batch: Batch) -> Batch:
        """The batch with the model outputs that the objective needs, from forward passes without gradients."""
        if self.old_logprobs == "rollout":
            batch = batch.with_tokens(old_logprobs=batch.tokens["rollout_logprobs"])
        missing = self.needs - batch.tokens.keys()
        if "old_logprobs" in missing:
            batch = batch.with_tokens(old_logprobs=self.actor.outputs(batch, LOGPROBS)["logprobs"])
        if "ref_logprobs" in missing:
            batch = batch.with_tokens(ref_logprobs=self.reference_logprobs(batch))
        if "refined_logprobs" in missing:
            logprobs = self.actor.outputs(pairs(batch), LOGPROBS)["logprobs"] if has_pairs(batch) else torch.zeros(0)
            batch = batch.with_tokens(refined_logprobs=on_response_tokens(logprobs, batch))
        if "teacher_logprobs" in missing:
            with self.actor.use_weights(self.teacher.weights) if self.teacher else nullcontext():
                logprobs = self.actor.outputs(batch.in_context(), LOGPROBS)["logprobs"]
            batch = batch.with_tokens(teacher_logprobs=logprobs)
        if self.critic:
            batch = batch.with_tokens(values=self.critic.outputs(batch, VALUES)["values"])
        return batch

    def measure(self, batch: Batch, step: int) -> Numbers:
        """KL(policy || reference) before the step if it is due, by the k3 estimate on the sampled tokens."""
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

    def second(self, update: Update, mini_batch: Batch) -> Second | None:
        """The second distribution that `update` compares with."""
        other = update.second
        if other is None:
            return None
        if self.given:
            return self.given.second(mini_batch, other)
        teacher = self.teacher.weights if self.teacher else None
        weights = {"reference": self.reference, "teacher": teacher, "actor": None}[other.weights]
        return Second(mini_batch.in_context() if other.in_context else mini_batch, weights, other.extrapolation)

    def while_waiting(self, state: State, phases: Phases) -> None:
        """Compute what the next step may need, while engines in other processes generate its batch."""
        if self.verification:
            self.verification.compute(state, self.skips_zero_advantages, phases("verification"))

    @property
    def skips_zero_advantages(self) -> bool:
        """Not while router biases move: they balance the experts over the whole batch."""
        return self.actor.batching.skip_zero_advantages == "auto" and not self.actor.bias_update_rate

    def step(self, update: Update, batch: Batch, counts: Numbers, second: Second | None = None) -> Numbers:
        """Make one optimizer step of `update` on `batch` and `counts` of `Update.computed`. Returns its metrics."""
        actor = self.trained[update.model]
        gradient = self.verification and self.verification.take(update)
        gradient = gradient or actor.backward(batch, update.loss, counts, update.outputs, second)
        return actor.apply(gradient, update.learning_rate, update.moments, update.scale)

    def part_norms(self, update: Update, batch: Batch, counts: Numbers, second: Second | None) -> Numbers:
        """Gradient norms of the parts of the loss, each by a backward pass; the weights do not change. Collective."""
        norms = {}
        for name, part_of in update.parts.items():
            self.actor.backward(batch, part_of(update.loss), counts, update.outputs, second)
            norms[name] = self.actor.optimizer.grad_norm()
        return norms

    def end_of_step(self) -> None:
        if self.teacher:
            self.teacher.update()
