"""Builds the tokenizer, the networks and the sampling options of a run."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_rft.config import Evaluation, Model, Recipe, Rollout
from megatron_rft.config.algorithms.online import Critic
from megatron_rft.config.lora import Lora
from megatron_rft.config.plugins import Teaching
from megatron_rft.conversion import load_config
from megatron_rft.conversion.folder import read_tokenizer
from megatron_rft.data.hub import model_folder
from megatron_rft.data.prompts import check_tokenizer, eos_token_id
from megatron_rft.evaluation.evaluate import GradedSampler
from megatron_rft.inference.engine import Engine, Sampling
from megatron_rft.megatron import weights
from megatron_rft.megatron.actor import Actor
from megatron_rft.megatron.ema import MovingAverage
from megatron_rft.objectives.base import Objective
from megatron_rft.rewards.base import Reward
from megatron_rft.training import adapters, teacher
from megatron_rft.training.models import EarlyVerification, Models
from megatron_rft.utils.errors import DataError


def tokenizer_folder(model: Model) -> Path:
    return model_folder(model.tokenizer or model.path, "model.tokenizer")


def load_tokenizer(model: Model) -> Any:
    option, fix = "model.tokenizer" if model.tokenizer else "model.path", "Set model.tokenizer to a folder or hub name"
    return read_tokenizer(tokenizer_folder(model), option, f"{fix} that has one")


def load_hf_config(model: Model) -> Any:
    try:
        return load_config(model_folder(model.path))
    except DataError as error:
        raise DataError(f"model.path: {error}") from None


def load_model_files(
    model: Model, seed: int = 0, lora: Lora | None = None, teaching: Teaching | None = None
) -> tuple[Any, Any]:
    """The tokenizer and the configuration, which must fit each other, the adapters to start from, and the teachers."""
    tokenizer, hf_config = load_tokenizer(model), load_hf_config(model)
    check_tokenizer(tokenizer, hf_config.vocab_size, model.path)
    for path in teaching.teachers.values() if teaching else ():
        teacher.check_tokenizer(path, tokenizer, tokenizer_folder(model))
    if lora and lora.path:
        adapters.read_start(lora, model, seed, hf_config)
    return tokenizer, hf_config


def start_weights(model: Model, seed: int, hf_config: Any) -> Callable[[str], torch.Tensor]:
    """HF name -> tensor of the initial weights."""
    if model.initialise == "random":
        return weights.random_tensors(hf_config, seed)
    return weights.open_folder(model_folder(model.path), hf_config)


@dataclass(frozen=True)
class Networks:
    """Builds the models to train, with the weights that training starts from."""

    hf_config: Any
    recipe: Recipe

    def actor(self, total_steps: int, temperature: float, moments: tuple[str, ...] = ()) -> Actor:
        actor = self._empty(total_steps, {}, temperature=temperature, moments=moments)
        load_start(actor, self.recipe.model, self.recipe.run.seed)
        return actor

    def critic(self, options: Critic, total_steps: int, actor: Actor) -> Actor:
        """The value model: the weights of the policy or of critic.path, and a zero value head. Its learning rate
        follows the policy's schedule, scaled. With adapters, it has its own on the frozen weights of `actor`, or new
        ones on those of critic.path, which is not the model of lora.path's."""
        own = {"lr": options.lr, "lr_warmup_steps": options.lr_warmup_steps, "clip_grad": options.clip_grad}
        own["min_lr"] = self.recipe.optimizer.min_lr * (options.lr / self.recipe.optimizer.lr)
        critic, model, seed = self._empty(total_steps, own, value_head=True), self.recipe.model, self.recipe.run.seed
        if options.path is None:
            load_start(critic, model, seed)
            theirs = dict(weights.named_tensors(actor.models))
            for name, parameter in weights.named_tensors(critic.models):
                if not parameter.requires_grad:  # it computes with the actor's frozen weights
                    parameter.data = theirs[name].data
        else:
            if critic.lora:
                critic.load(weights.new_adapters(self.hf_config, critic.lora, seed), adapters=True)
            critic.load(weights.open_folder(model_folder(options.path, "critic.path"), self.hf_config))
        return critic

    def online(self, objective: Objective, of_row: dict[int, str]) -> Models:
        """The actor and the other networks that the objective needs. `of_row`: teachers' names, of several."""
        recipe, algorithm, constraint = self.recipe, self.recipe.algorithm, self.recipe.constraint
        # A learning rate schedule spans all optimizer steps of the run.
        optimizer_steps = recipe.setting.mini_batches * algorithm.epochs
        total_steps, critic_only = recipe.run.steps, recipe.critic.warmup_steps if recipe.critic else 0
        own_moments = recipe.pipo is not None and recipe.pipo.optimizer_state == "own"
        moments = ("verification",) if own_moments else ()
        actor = self.actor((total_steps - critic_only) * optimizer_steps, recipe.rollout.temperature, moments)
        critic = reference = None
        if "values" in objective.needs:
            critic = self.critic(recipe.critic, total_steps * optimizer_steps, actor)
        kl_every, rate, teaching = constraint.kl_every if constraint else 0, algorithm.teacher_average, recipe.teaching
        if objective.needs & {"ref_logprobs", "reference"} or kl_every or recipe.refines:
            reference = reference_weights(recipe.model, recipe.run.seed, actor)
        return Models(
            actor,
            objective.needs,
            verification=EarlyVerification(objective, actor) if recipe.pipo else None,
            critic=critic,
            reference=reference,
            teacher=MovingAverage(actor, rate) if rate else None,
            given=teaching and teacher.Teachers(teaching, of_row, actor, recipe.megatron, recipe.model.precision),
            old_logprobs=algorithm.old_logprobs,
            kl_every=kl_every,
            norms_every=constraint.norms_every if recipe.refines else 0,
        )

    def _empty(self, total_steps: int, own: dict[str, Any], **options: Any) -> Actor:
        """`own`: other options of the optimizer."""
        recipe = self.recipe
        return Actor(
            self.hf_config,
            recipe.megatron,
            recipe.batching,
            recipe.model.precision,
            optimizer=recipe.optimizer.model_dump() | own,
            total_steps=total_steps,
            lora=recipe.lora,
            trains_tower=recipe.model.vision == "trained",
            **options,
        )


def load_start(actor: Actor, model: Model, seed: int) -> None:
    """Set the weights that training starts from."""
    actor.load(start_weights(model, seed, actor.hf_config))
    adapters.load_start(actor, model, seed)


def reference_weights(model: Model, seed: int, actor: Actor) -> list[torch.Tensor]:
    """The weights of model.reference, else the run's initial weights. The actor must have the initial weights."""
    if model.reference is None:
        return actor.snapshot()
    actor.load(weights.open_folder(model_folder(model.reference, "model.reference"), actor.hf_config))
    if actor.lora:  # adapters without effect
        actor.load(weights.new_adapters(actor.hf_config, actor.lora, seed), adapters=True)
    reference = actor.snapshot(frozen=True)
    load_start(actor, model, seed)
    return reference


def stop_token_ids(stops: list[int | str], tokenizer: Any) -> tuple[int, ...]:
    """The end-of-sequence token and those of rollout.stop. Each stop must be one token."""
    ends, known = [eos_token_id(tokenizer)], set(tokenizer.get_vocab().values() if stops else ())
    for stop in stops:
        ids = {stop} & known if isinstance(stop, int) else tokenizer.encode(stop, add_special_tokens=False)
        if len(ids) != 1:
            raise DataError(f"rollout.stop {stop!r} is {len(ids)} tokens for this tokenizer; a stop must be one token")
        ends += ids
    return tuple(dict.fromkeys(ends))


def build_sampling(
    rollout: Rollout,
    tokenizer: Any,
    max_tokens: int | None = None,
    temperature: float | None = None,
    routes: bool = False,
) -> Sampling:
    """`max_tokens`, `temperature`: an evaluation's, which samples from the whole distribution. `routes`: with the
    experts of each token."""
    stops, length = stop_token_ids(rollout.stop, tokenizer), max_tokens or rollout.max_response_tokens
    if temperature is not None:
        return Sampling(length, temperature, stop_token_ids=stops)
    return Sampling(length, rollout.temperature, rollout.top_p, rollout.top_k, rollout.min_p, stops, routes=routes)


def evaluation_sampler(
    options: Evaluation, rollout: Rollout, engine: Engine | None, tokenizer: Any, reward: Reward | None, seed: int
) -> GradedSampler:
    """Samples the completions of evaluations. `engine` and `reward` may be given later."""
    sampling = build_sampling(rollout, tokenizer, options.max_response_tokens, options.temperature)
    return GradedSampler(engine, sampling, tokenizer, reward, options.samples, seed)
