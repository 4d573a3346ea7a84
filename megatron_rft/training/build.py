"""Builds the tokenizer, the networks, the sampling options and the evaluator of a recipe."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from megatron_rft.config import Model, Recipe, Rollout
from megatron_rft.config.lora import Lora
from megatron_rft.config.plugins import Teaching
from megatron_rft.conversion import load_config
from megatron_rft.data.hub import model_folder
from megatron_rft.data.prompts import check_tokenizer, eos_token_id
from megatron_rft.evaluation.evaluate import GradedSampler
from megatron_rft.inference.engine import Engine, Sampling
from megatron_rft.megatron import parallel, weights
from megatron_rft.megatron.actor import Actor
from megatron_rft.records import Prompt
from megatron_rft.rewards.base import Reward
from megatron_rft.training import adapters, teacher
from megatron_rft.training.evaluator import Evaluator
from megatron_rft.training.problems import Problems
from megatron_rft.utils.errors import DataError

TOKENIZERS = ("tokenizer.json", "vocab.json", "vocab.txt", "*.model", "*.tiktoken", "tekken.json")


def tokenizer_folder(model: Model) -> Path:
    return model_folder(model.tokenizer or model.path, "model.tokenizer")


def load_tokenizer(model: Model) -> Any:
    folder = tokenizer_folder(model)
    if not any(found for name in TOKENIZERS for found in folder.glob(name)):  # transformers would make an empty one
        raise DataError(
            f"{'model.tokenizer' if model.tokenizer else 'model.path'}: {folder} has no tokenizer (tokenizer.json or "
            "another of transformers' files). Set model.tokenizer to a folder or hub name that has one"
        )
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise DataError(f"model.tokenizer: no tokenizer can be loaded from {folder}: {error}") from None


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


def build_actor(recipe: Recipe, hf_config: Any, total_steps: int, moments: tuple[str, ...] = ()) -> Actor:
    """The model to train, with its initial weights."""
    actor = Actor(
        hf_config,
        recipe.megatron,
        recipe.batching,
        recipe.model.precision,
        temperature=recipe.rollout.temperature,
        optimizer=recipe.optimizer.model_dump(),
        total_steps=total_steps,
        moments=moments,
        lora=recipe.lora,
    )
    load_start(actor, recipe.model, recipe.run.seed)
    return actor


def load_start(actor: Actor, model: Model, seed: int) -> None:
    """Set the weights that training starts from."""
    actor.load(start_weights(model, seed, actor.hf_config))
    adapters.load_start(actor, model, seed)


def build_critic(recipe: Recipe, hf_config: Any, total_steps: int, actor: Actor) -> Actor:
    """The value model: the weights of the policy or of critic.path, and a zero value head. Its learning rate follows
    the policy's schedule, scaled. With adapters, it has its own on the frozen weights of `actor`, or of critic.path."""
    options = recipe.critic
    scale = options.lr / recipe.optimizer.lr
    own = {"lr": options.lr, "lr_warmup_steps": options.lr_warmup_steps, "clip_grad": options.clip_grad}
    critic = Actor(
        hf_config,
        recipe.megatron,
        recipe.batching,
        recipe.model.precision,
        optimizer=recipe.optimizer.model_dump() | own | {"min_lr": recipe.optimizer.min_lr * scale},
        total_steps=total_steps,
        value_head=True,
        lora=recipe.lora,
    )
    if options.path is None:
        load_start(critic, recipe.model, recipe.run.seed)
        adapters.share_base(critic, actor)
    else:
        adapters.load_start(critic, recipe.model, recipe.run.seed)
        critic.load(weights.open_folder(model_folder(options.path, "critic.path"), hf_config))
    return critic


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
    ends = [eos_token_id(tokenizer)]
    for stop in stops:
        ids = [stop] if isinstance(stop, int) else tokenizer.encode(stop, add_special_tokens=False)
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


def build_evaluator(
    recipe: Recipe, engine: Engine, tokenizer: Any, reward: Reward, folder: Path | None = None, **given: list[Prompt]
) -> Evaluator:
    """An evaluator for all ranks of a run, or, with a `folder` for the answers, for one process. `given`: problems of
    parts without a data source in the recipe."""
    options = recipe.evaluation
    sampling = build_sampling(recipe.rollout, tokenizer, options.max_response_tokens, options.temperature)
    seed, on_nonfinite = recipe.run.seed, recipe.reward.on_nonfinite
    sampler = GradedSampler(engine, sampling, tokenizer, reward, options.samples, seed, on_nonfinite)
    parts = options, Problems.of(recipe), sampler
    if folder is not None:
        return Evaluator(*parts, folder)
    folder = Path(recipe.run.output_dir) / "evaluation"
    return Evaluator(*parts, folder, parallel.gather, *engine.driver(), given)
