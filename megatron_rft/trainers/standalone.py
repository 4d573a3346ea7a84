"""Measure a model in Hugging Face format on a recipe's problems, without training it: one process, no megatron-core."""

from pathlib import Path

import torch

from megatron_rft import rewards
from megatron_rft.config import Recipe
from megatron_rft.errors import ConfigError
from megatron_rft.evaluation.evaluate import EvalResult, evaluate, table, write
from megatron_rft.rollout.engine import Sampling
from megatron_rft.rollout.hf_engine import HFEngine
from megatron_rft.trainers import assembly


def evaluate_model(recipe: Recipe, folder: Path) -> list[EvalResult]:
    """The model at `recipe.model.path` on data.validation and data.test; results and completions go into `folder`."""
    options, rollout = recipe.evaluation, recipe.rollout
    parts = [part for part in ("validation", "test") if getattr(recipe.data, part)]
    if not parts:
        raise ConfigError("data.test: there is nothing to evaluate on: give data.test or data.validation")
    tokenizer = assembly.load_tokenizer(recipe)
    sampling = Sampling(
        max_tokens=options.max_response_tokens or rollout.max_response_tokens,
        temperature=options.temperature,
        stop_token_ids=assembly.stop_token_ids(recipe, tokenizer),
    )
    engine = HFEngine(
        recipe.model.path,
        dtype=assembly.DTYPES[rollout.dtype or recipe.model.precision],
        device="cuda" if torch.cuda.is_available() else "cpu",
        max_batch_sequences=rollout.max_batch_sequences,
    )
    reward = rewards.build(recipe.reward)
    try:
        results = []
        for part in parts:
            prompts = assembly.load_prompts(recipe, part, tokenizer).prompts[: options.limit]
            results.append(
                evaluate(
                    engine,
                    sampling,
                    prompts,
                    reward,
                    tokenizer,
                    options.samples,
                    recipe.run.seed,
                    batch=options.batch,
                    name=part,
                )
            )
    finally:
        reward.close()
        engine.close()
    write(results, folder)
    return results


def run(recipe: Recipe, folder: Path) -> int:
    print(table(evaluate_model(recipe, folder)))
    print(f"results and completions: {folder}")
    return 0
