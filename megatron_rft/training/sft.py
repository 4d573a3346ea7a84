"""Supervised fine-tuning on given answers, such as the warm start of a reinforcement-learning run."""

import math
from contextlib import ExitStack, closing

from megatron_rft import objectives
from megatron_rft.config import Recipe
from megatron_rft.data.prompts import as_batch
from megatron_rft.data.stream import Stream
from megatron_rft.training import build, loop
from megatron_rft.training.engines import EngineBuilder
from megatron_rft.training.models import Models
from megatron_rft.training.problems import Problems
from megatron_rft.training.run import TrainingRun
from megatron_rft.training.stored import StoredBatches, build_evaluator


def train(recipe: Recipe) -> int:
    """Train until run.steps, run.epochs or a signal. Returns the exit status."""
    EngineBuilder.of(recipe).check_gpus()
    tokenizer, hf_config = build.load_model_files(recipe.model, recipe.run.seed, recipe.lora)
    answers, dropped = Problems.of(recipe).demonstrations(tokenizer, recipe.rollout.max_response_tokens)
    stream, size = Stream(answers, recipe.run.seed, recipe.data.shuffle), recipe.algorithm.batch_sequences
    steps = recipe.run.steps or math.ceil(recipe.run.epochs * len(answers) / size)
    models = Models(build.build_actor(recipe, hf_config, steps))
    with ExitStack() as stack:
        evaluator, weights = build_evaluator(recipe, hf_config, tokenizer, models, stack)
        run = stack.enter_context(closing(TrainingRun(recipe, models, stream, steps, evaluator, dropped)))
        batches = StoredBatches(stream, size, as_batch, weights, run.phases)
        return loop.train(run, batches, models, objectives.build(recipe.algorithm))
