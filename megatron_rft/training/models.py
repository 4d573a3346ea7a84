"""The networks of an online run: the actor, and where the objective asks for them a critic, a reference, a teacher.

The reference and the teacher share the actor's layout and run in its place: their weights wait in host memory.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_rft.config import Recipe
from megatron_rft.data.hub import model_folder
from megatron_rft.inference import weight_sync
from megatron_rft.inference.engine import Engine
from megatron_rft.megatron import weights
from megatron_rft.megatron.actor import Actor
from megatron_rft.megatron.ema import MovingAverage
from megatron_rft.megatron.second_distribution import Second
from megatron_rft.objectives.base import Beside, Objective, Update
from megatron_rft.objectives.plugins.dynamic import has_pairs, on_response_tokens, pairs
from megatron_rft.records import Batch
from megatron_rft.training import build

LOGPROBS, VALUES = frozenset({"logprobs"}), frozenset({"values"})


class Models:
    def __init__(self, recipe: Recipe, hf_config: Any, objective: Objective, policy_steps: int, critic_steps: int):
        own_moments = recipe.pipo is not None and recipe.pipo.optimizer_state == "own"
        moments = ("verification",) if own_moments else ()
        self.needs = objective.needs
        self.actor = build.build_actor(recipe, hf_config, policy_steps, moments)
        self.critic = build.build_critic(recipe, hf_config, critic_steps) if "values" in self.needs else None
        compared = self.needs & {"ref_logprobs", "ref_kl", "reference"}
        measured = recipe.constraint is not None and recipe.constraint.kl_every > 0
        wanted = compared or measured or recipe.refines
        self.reference = reference_weights(recipe, self.actor) if wanted else None
        rate = recipe.algorithm.teacher_average
        self.teacher = MovingAverage(self.actor, rate) if rate else None

    @property
    def trained(self) -> dict[str, Actor]:
        return {"actor": self.actor} | ({"critic": self.critic} if self.critic else {})

    @property
    def averages(self) -> dict[str, MovingAverage]:
        return {"teacher": self.teacher} if self.teacher else {}

    def outputs(self, batch: Batch, old: str) -> Batch:
        """The batch with what the objective needs of the models, each a forward pass without gradients; `old` is
        algorithm.old_logprobs."""
        if old == "rollout":
            batch = batch.with_tokens(old_logprobs=batch.tokens["rollout_logprobs"])
        elif "old_logprobs" in self.needs:
            batch = batch.with_tokens(old_logprobs=self.actor.outputs(batch, LOGPROBS)["logprobs"])
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

    def reference_logprobs(self, batch: Batch) -> Tensor:
        """[R]"""
        with self.actor.swapped(self.reference):
            return self.actor.outputs(batch, LOGPROBS)["logprobs"]

    def push_reference(self, engine: Engine) -> None:
        """The reference's weights into an engine that keeps them."""
        with self.actor.swapped(self.reference):
            weight_sync.push(self.actor.stream(), engine, version=0, verify=True)

    def _teacher_logprobs(self, batch: Batch) -> Tensor:
        if self.teacher is None:
            return self.actor.outputs(batch.in_context(), LOGPROBS)["logprobs"]
        with self.actor.swapped(self.teacher.weights):
            return self.actor.outputs(batch.in_context(), LOGPROBS)["logprobs"]

    def second(self, update: Update, mini_batch: Batch) -> Second | None:
        """The distribution that `update` wants beside the model's own."""
        if update.beside is None:
            return None
        return Second(
            mini_batch.in_context() if update.beside.in_context else mini_batch,
            self._weights(update.beside),
            update.beside.extrapolation,
        )

    def _weights(self, beside: Beside) -> list[Tensor] | None:
        if beside.weights == "reference":
            return self.reference
        if beside.weights == "teacher":
            return self.teacher.weights
        assert beside.weights == "actor", beside.weights
        return None

    def end_of_step(self) -> None:
        if self.teacher:
            self.teacher.update()


def reference_weights(recipe: Recipe, actor: Actor) -> list[Tensor]:
    """The weights that this run starts from, which the actor has, or those of model.reference."""
    if recipe.model.reference is None:
        return actor.snapshot()
    folder = model_folder(recipe.model.reference, "model.reference")
    actor.load(weights.open_folder(folder, actor.hf_config))
    reference = actor.snapshot()
    actor.load(build.start_weights(recipe, actor.hf_config))
    return reference
