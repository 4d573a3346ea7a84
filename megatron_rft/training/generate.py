"""Samples and grades responses to a data set once, into a trajectory store (trainer: generate).

Workers form no process group. Each writes the shards whose numbers it is assigned; a worker that finds all shards
writes the index. Each (seed, problem, sample) has its own random stream, so a shard does not depend on the number of
workers or on kills and restarts.
"""

import json
import math
import os
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch

from megatron_rft.config import Recipe, RewardOptions
from megatron_rft.conversion.convert import SourceCheckpoint
from megatron_rft.conversion.folder import model_fingerprint, tokenizer_fingerprint
from megatron_rft.data import trajectories as store
from megatron_rft.data.hub import model_folder
from megatron_rft.data.stream import Stream
from megatron_rft.data.trajectories import Trajectory
from megatron_rft.evaluation.evaluate import GradedSampler
from megatron_rft.inference import weight_sync
from megatron_rft.launching.run_folder import RECIPE_FILE, claim_folder
from megatron_rft.records import Prompt, Response, Score
from megatron_rft.rewards import registry
from megatron_rft.rewards.base import check_share
from megatron_rft.training import build
from megatron_rft.training.engines import EngineBuilder
from megatron_rft.training.episodes import around
from megatron_rft.training.problems import Problems
from megatron_rft.utils.errors import FINISHED, DataError
from megatron_rft.utils.files import write_atomically


def answers(sampler: GradedSampler, prompts: list[Prompt]) -> list[Trajectory]:
    """Graded responses to all `prompts`.

    Raises:
        RunFailed: the grader failed on more of them than the recipe allows.
    """
    graded = sampler(prompts, "generate")
    failed = [(prompt, score.error) for prompt, *_, score in graded if score.error is not None]
    check_share(failed, len(graded), sampler.reward, "generate")
    return [_trajectory(*each, sampler.reward.maximum) for each in graded]


def _trajectory(prompt: Prompt, sample: int, response: Response, text: str, score: Score, maximum: float) -> Trajectory:
    right = score.reward >= maximum if score.correct is None else score.correct
    return Trajectory(
        problem=prompt.index,
        sample=sample,
        prompt=prompt.text,
        answer=prompt.answer,
        prompt_ids=response.prompt_ids or prompt.token_ids,
        response_ids=response.token_ids,
        text=text,
        reward=None if score.error is not None else 1 if right else -1,
        error=score.error,
        logprobs=response.logprobs,
        finish_reason=response.finish_reason,
        problem_ids=prompt.token_ids if response.prompt_ids else None,
        segment_of=response.segment_of or None,
        turns=[position for first, end, _ in response.turns for position in (first, end)] or None,
        images=prompt.images.digest if prompt.images_key >= 0 else None,
        shown=response.images,
        fields=json.dumps(prompt.fields, default=str) if sample == 0 else None,
    )


def run(recipe: Recipe) -> int:
    """Write this worker's shards, and the index if all shards exist. Returns the exit status."""
    folder = Path(recipe.run.output_dir)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    while rank and not (folder / RECIPE_FILE).is_file():  # the first worker claims the folder
        time.sleep(0.1)
    claim_folder(recipe)
    tokenizer, hf_config = build.load_model_files(recipe.model)
    problems = Problems(recipe.data, recipe.environment).prompts("train", tokenizer)
    prompts, size = problems.prompts, recipe.generation.problems_per_shard
    shards = -(-len(prompts) // size)
    if rank == 0:
        for reason, count in problems.dropped.items():
            print(f"data.train: {count} rows left out ({reason})", flush=True)
    engines = EngineBuilder(recipe)
    path = model_folder(recipe.model.path)
    inputs = {"model.path": model_fingerprint(path), "data.train": Stream(prompts).digest()}
    store.check_inputs(folder, inputs)
    mine = [number for number in store.missing(folder, shards) if number % world == rank]
    with ExitStack() as stack:
        sampler = None
        if mine:
            model = SourceCheckpoint(path, "hf", hf_config, path)
            sampler = _sampler(engines, model, recipe.run.seed, recipe.reward, tokenizer, stack)
        for number in mine:
            graded = answers(sampler, prompts[number * size : (number + 1) * size])
            write_atomically(folder / store.INPUTS, json.dumps(inputs))
            store.write_shard(folder, number, graded)
            right = sum(each.reward == 1 for each in graded)
            print(f"shard {number + 1} of {shards}: {len(graded)} responses, {right} of them right", flush=True)
    options = recipe.rollout
    facts = {
        "model": recipe.model.path,
        "model_fingerprint": inputs["model.path"],
        "tokenizer_fingerprint": tokenizer_fingerprint(build.tokenizer_folder(recipe.model)),
        "data": recipe.data.train.path,
        "problems": len(prompts),
        "responses_per_problem": options.group_size,
        **options.model_dump(include={"temperature", "max_response_tokens"}),
        "stop_token_ids": list(build.stop_token_ids(options.stop, tokenizer)),
        "engine": engines.kind(hf_config),
        "images": recipe.data.image_field and recipe.data.model_dump(exclude_defaults=True),
        "environment": recipe.environment and recipe.environment.model_dump(),
        "dtype": options.dtype or recipe.model.precision,
        "seed": recipe.run.seed,
        "reward": recipe.reward.kind,
    }
    index = store.finish(folder, shards, recipe.generation.held_out, recipe.run.seed, facts)
    if index is not None:
        text = store.describe(index["summary"])
        (folder / "summary.txt").write_text(text + "\n")
        print(f"{text}\ntrajectories: {folder}", flush=True)
        if not index["train"]:
            raise DataError(f"{folder}: no problem has a right and a wrong response: there is nothing to learn from")
    return FINISHED


def _sampler(
    engines: EngineBuilder, model: SourceCheckpoint, seed: int, options: RewardOptions, tokenizer: Any, stack: ExitStack
) -> GradedSampler:
    device = "cuda" if torch.cuda.is_available() else "cpu"  # the one that this worker sees
    reward = stack.enter_context(closing(registry.build(options)))
    if math.isinf(reward.maximum):
        why = "has no best reward, but trajectories are right or wrong"
        raise DataError(f"reward.kind: {options.kind} {why}: use a verifier")
    engine = engines.local(model.hf_config)(device)
    player = around(engine, engines, tokenizer, stack)
    weight_sync.send(model.tensors(), engine, version=0)
    rollout = engines.recipe.rollout
    sampling = build.build_sampling(rollout, tokenizer)
    return GradedSampler(player, sampling, tokenizer, reward, rollout.group_size, seed)
