"""Measure a model in Hugging Face format on a recipe's problems, in one process, by transformers alone."""

from contextlib import ExitStack, closing
from pathlib import Path

import torch

from megatron_rft import rewards
from megatron_rft.config import Recipe
from megatron_rft.errors import ConfigError
from megatron_rft.evaluation.evaluate import EvalResult, table, write
from megatron_rft.rollout.hf_engine import HFEngine
from megatron_rft.trainers import assembly


def evaluate_model(recipe: Recipe, folder: Path) -> list[EvalResult]:
    """The model at `recipe.model.path` on data.validation and data.test; results and completions go into `folder`."""
    parts = [part for part in ("validation", "test") if getattr(recipe.data, part)]
    if not parts:
        raise ConfigError("data.test: there is nothing to evaluate on: give data.test or data.validation")
    with ExitStack() as stack:
        reward = stack.enter_context(closing(rewards.build(recipe.reward)))
        engine = HFEngine(
            assembly.local_folder(recipe.model.path),
            dtype=assembly.DTYPES[recipe.rollout.dtype or recipe.model.precision],
            device="cuda" if torch.cuda.is_available() else "cpu",
            max_batch_sequences=recipe.rollout.max_batch_sequences,
        )
        stack.enter_context(closing(engine))
        evaluator = assembly.Evaluator(recipe, engine, assembly.load_tokenizer(recipe), reward, folder)
        results = [evaluator.measure(part) for part in parts]
    write(results, folder)
    return results


def run(recipe: Recipe, folder: Path) -> int:
    print(table(evaluate_model(recipe, folder)))
    print(f"results and completions: {folder}")
    return 0
