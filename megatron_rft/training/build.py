"""From a recipe to the parts of a run: tokenizer, data, model, engine, sampler. What is wrong with them shows here."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoTokenizer, PreTrainedConfig

from megatron_rft.config import Recipe, Source
from megatron_rft.config.datasets import DATASETS
from megatron_rft.conversion import load_config
from megatron_rft.data.hub import model_folder
from megatron_rft.data.prompts import PromptFormat, PromptSet, eos_token_id, prompt_set
from megatron_rft.data.rows import Row, load_rows
from megatron_rft.evaluation.evaluate import EvalResult, evaluate, write
from megatron_rft.evaluation.kept import Kept
from megatron_rft.inference.engine import Engine, Sampling
from megatron_rft.inference.hf.engine import HFEngine
from megatron_rft.megatron import parallel, weights
from megatron_rft.megatron.actor import Actor
from megatron_rft.plan.engines import gpu_share
from megatron_rft.plan.model_shape import shape_of
from megatron_rft.plan.vllm import GPU_SHARE, choose, choose_for
from megatron_rft.records import Prompt
from megatron_rft.rewards import Reward
from megatron_rft.training import engines
from megatron_rft.utils.errors import DataError

PREDICTED = {"method": "predicted_output", "num_speculative_tokens": 16}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16}


def gather(items: list) -> list:
    """The items of all ranks, in rank order, on every rank. Waits as long as generation may take."""
    everyone: list[list] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, items, group=parallel.host_group("generation"))
    return [item for part in everyone for item in part]


def tokenizer_folder(recipe: Recipe) -> Path:
    return model_folder(recipe.model.tokenizer or recipe.model.path, "model.tokenizer")


def load_tokenizer(recipe: Recipe) -> Any:
    folder = tokenizer_folder(recipe)
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise DataError(f"model.tokenizer: no tokenizer can be loaded from {folder}: {error}") from None


def load_hf_config(recipe: Recipe) -> Any:
    try:
        return load_config(model_folder(recipe.model.path))
    except DataError as error:
        raise DataError(f"model.path: {error}") from None


def source_of(recipe: Recipe, part: str) -> Source:
    """data.train, data.validation, data.test, or the benchmark of that name."""
    return recipe.evaluation.benchmarks.get(part) or getattr(recipe.data, part)


def rows_of(recipe: Recipe, part: str) -> list[Row]:
    source = source_of(recipe, part)
    try:
        return load_rows(
            source.path,
            source.split,
            source.limit or recipe.data.limit,
            adapter=source.adapter,
            subset=source.subset,
            files=source.files,
            part="test" if part in recipe.evaluation.benchmarks else part,
        )
    except DataError as error:
        raise DataError(f"{place_of(recipe, part)}: {error}") from None


def place_of(recipe: Recipe, part: str) -> str:
    """Where a part stands in the recipe."""
    return f"{'evaluation.benchmarks' if part in recipe.evaluation.benchmarks else 'data'}.{part}"


def prompt_format(recipe: Recipe, part: str) -> PromptFormat:
    """How the rows of a part become prompts. An adapter's rows have names, and a template, of their own."""
    data, source = recipe.data, source_of(recipe, part)
    common = dict(chat=data.chat, max_prompt_tokens=data.max_prompt_tokens, overlong=data.overlong)
    if source.adapter is None:
        prompt, answer = source.prompt_field or data.prompt_field, source.answer_field or data.answer_field
        return PromptFormat(prompt, answer, source.prompt_template or data.prompt_template, **common)
    known = DATASETS[source.adapter]
    # "Solve this math problem ..." is for the recipe's own task, not for programs that are measured beside it.
    shared = None if part in recipe.evaluation.benchmarks and known.reward != "math" else data.prompt_template
    learned = recipe.trainer == "sft" and part == "train"
    return PromptFormat(
        answer_field="solution" if learned else "answer",
        prompt_template=source.prompt_template or shared or known.template,
        answered=known.reward not in ("code", "model"),
        adapted=True,
        **common,
    )


def load_prompts(recipe: Recipe, part: str, tokenizer: Any) -> PromptSet:
    return prompt_set(rows_of(recipe, part), tokenizer, prompt_format(recipe, part), place_of(recipe, part))


def build_actor(recipe: Recipe, hf_config: Any, total_steps: int, moments: tuple[str, ...] = ()) -> Actor:
    """The model to train, with the weights that it starts from."""
    actor = Actor(
        hf_config,
        recipe.megatron,
        recipe.batching,
        recipe.model.precision,
        temperature=recipe.rollout.temperature,
        optimizer=recipe.optimizer.model_dump(),
        total_steps=total_steps,
        moments=moments,
    )
    actor.load(start_weights(recipe, hf_config))
    return actor


def build_critic(recipe: Recipe, hf_config: Any, total_steps: int) -> Actor:
    """The value model: the policy's weights, or critic.path's, and a value head of zeros. Its learning rate's schedule
    has the shape of the policy's."""
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
    )
    if options.path is None:
        critic.load(start_weights(recipe, hf_config))
    else:
        critic.load(weights.open_folder(model_folder(options.path, "critic.path"), hf_config))
    return critic


def start_weights(recipe: Recipe, hf_config: Any) -> Callable[[str], torch.Tensor]:
    if recipe.model.initialise == "random":
        return weights.random_tensors(hf_config, recipe.run.seed)
    return weights.open_folder(model_folder(recipe.model.path), hf_config)


def build_engine(recipe: Recipe, hf_config: Any) -> Engine:
    """The generation engine of this rank, without weights yet."""
    dtype = DTYPES[recipe.rollout.dtype or recipe.model.precision]
    choose_for(recipe.rollout, shape_of(hf_config.to_dict()))  # a model from the hub is known only now
    if recipe.rollout.placement == "server":  # which has its own vLLM, wherever it is
        return engines.build(recipe, hf_config, None, dtype, gather)
    alone = recipe.rollout.placement == "process" and engines.alone(recipe)
    build_on = engine_builder(recipe, hf_config, gpu_share=None if alone else gpu_share(recipe))
    if recipe.rollout.placement == "process":
        return engines.build(recipe, hf_config, build_on, dtype, gather)
    engine = build_on(parallel.device())
    parallel.meet("start")
    return engine


def build_refining_engine(recipe: Recipe, hf_config: Any) -> Engine:
    """In this process, beside the policy's. It takes longer prompts, and guesses of their responses."""
    own = {"max_model_len": longest_refinement(recipe, hf_config), "tensor_parallel_size": 1}
    arguments = recipe.vllm.arguments() | own
    given = arguments.get("speculative_config") or {}
    if recipe.constraint.drafts(inside(recipe, hf_config)) and given.get("method") != PREDICTED["method"]:
        arguments |= {"speculative_config": PREDICTED}
    engine = engine_builder(recipe, hf_config, arguments, gpu_share(recipe))(parallel.device())
    parallel.meet("start")
    return engine


def longest_refinement(recipe: Recipe, hf_config: Any) -> int:
    """Tokens of a prompt and a response that the refiner takes: an engine for all of the model's positions would need
    a cache for as many."""
    return min(recipe.longest_refinement, hf_config.max_position_embeddings)


def engine_builder(
    recipe: Recipe, source: Any, arguments: dict[str, Any] | None = None, gpu_share: float | None = GPU_SHARE
) -> Callable[[torch.device | str], Engine]:
    """What makes the engine that rollout.engine comes to on a device, here or in a process of its own: a partial, so
    that it can travel there. `source`: a configuration, or a folder with weights. `arguments`: vLLM's, of the refiner.
    `gpu_share`: of its memory, as VLLMEngine takes it."""
    options = recipe.rollout
    dtype = DTYPES[options.dtype or recipe.model.precision]
    config = source if isinstance(source, PreTrainedConfig) else load_config(source)
    if inside(recipe, config) == "hf":
        return partial(HFEngine, source, dtype, max_batch_sequences=options.max_batch_sequences)
    from megatron_rft.inference.vllm.engine import VLLMEngine

    return partial(
        VLLMEngine,
        source,
        dtype,
        max_model_len=engines.longest(recipe, config),
        max_batch_sequences=options.max_batch_sequences,
        options=without_guesses(recipe) if arguments is None else arguments,
        gpu_share=gpu_share,
        keep_caches=arguments is None and options.cache_after_sync == "keep",
        sleeps=arguments is None,  # vLLM's allocator for sleep mode serves one engine of a process: the policy's
    )


def without_guesses(recipe: Recipe) -> dict[str, Any]:
    """vLLM's arguments, for requests that carry no guess of their response."""
    arguments = recipe.vllm.arguments()
    if (arguments.get("speculative_config") or {}).get("method") == PREDICTED["method"]:
        del arguments["speculative_config"]
    return arguments


def inside(recipe: Recipe, config: PreTrainedConfig) -> str:
    """What rollout.engine comes to for an engine that is no server: "vllm" or "hf"."""
    return choose(recipe.rollout.engine, shape_of(config.to_dict())).name


def stop_token_ids(recipe: Recipe, tokenizer: Any) -> tuple[int, ...]:
    """The end-of-sequence token and rollout.stop, each of which must be one token."""
    found = [eos_token_id(tokenizer)]
    for stop in recipe.rollout.stop:
        ids = [stop] if isinstance(stop, int) else tokenizer.encode(stop, add_special_tokens=False)
        if len(ids) != 1:
            raise DataError(f"rollout.stop {stop!r} is {len(ids)} tokens for this tokenizer; a stop must be one token")
        found += ids
    return tuple(dict.fromkeys(found))


@dataclass
class Evaluator:
    """Asks the model as the engine holds it; all ranks share the problems. Answers are kept under `folder`."""

    recipe: Recipe
    engine: Engine
    tokenizer: Any
    reward: Reward
    folder: Path
    gather: Callable[[list], list] = list
    rank: int | None = 0  # of the ranks that have an engine to ask; None: this one has none
    world: int = 1
    given: dict[str, list[Prompt]] = field(default_factory=dict)  # problems that no data source of the recipe has

    def measure(self, part: str, prompts: list[Prompt] | None = None, kept: Kept | None = None) -> EvalResult:
        """The problems of a part, or those of them that are given."""
        options = self.recipe.evaluation
        return evaluate(
            self.engine,
            self.sampling(),
            self.prompts(part) if prompts is None else prompts,
            self.reward,
            self.tokenizer,
            self.samples(part),
            self.recipe.run.seed,
            self.gather,
            rank=self.rank,
            world=self.world,
            batch=options.batch,
            name=part,
            kept=kept,
        )

    def sampling(self) -> Sampling:
        options = self.recipe.evaluation
        return Sampling(
            max_tokens=options.max_response_tokens or self.recipe.rollout.max_response_tokens,
            temperature=options.temperature,
            stop_token_ids=stop_token_ids(self.recipe, self.tokenizer),
        )

    def prompts(self, part: str) -> list[Prompt]:
        found = self.given[part] if part in self.given else load_prompts(self.recipe, part, self.tokenizer).prompts
        return found[: self.recipe.evaluation.limit]

    def samples(self, part: str) -> int:
        own = None if part in self.given else source_of(self.recipe, part).samples
        return own or self.recipe.evaluation.samples

    def __call__(self, part: str, step: int) -> dict[str, float]:
        """pass@1 of data.`part`, its standard error and more (EvalResult.summary), on record as that of `step`."""
        result = self.measure(part)
        if self.rank == 0:
            write([result], self._folder(part, step))
        return result.summary()

    def recorded(self, part: str, step: int) -> dict[str, float] | None:
        """What an earlier start of this run measured at `step`."""
        path = self._folder(part, step) / "results.json"
        return json.loads(path.read_text())[0] if path.is_file() else None

    def _folder(self, part: str, step: int) -> Path:
        return self.folder / f"{part}_step_{step:06d}"


def build_evaluator(recipe: Recipe, engine: Engine, tokenizer: Any, reward: Reward, **given: list[Prompt]) -> Evaluator:
    """For all ranks of a run together. `given`: the problems of parts that the recipe has no data source for."""
    folder = Path(recipe.run.output_dir) / "evaluation"
    return Evaluator(recipe, engine, tokenizer, reward, folder, gather, *engines.place(engine), given)


def headline(before: dict[str, float], after: dict[str, float]) -> str:
    """pass@1 0.31 ± 0.02 -> 0.58 ± 0.02 (500 problems)"""
    first, last = (f"{r['pass_at_1']:.2f} ± {r['standard_error']:.2f}" for r in (before, after))
    return f"pass@1 {first} -> {last} ({after['problems']} problems)"
