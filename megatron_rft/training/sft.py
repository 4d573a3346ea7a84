"""Supervised fine-tuning on given answers, such as the warm start of a reinforcement-learning run."""

import math
from contextlib import ExitStack

from megatron_rft import objectives
from megatron_rft.config import Recipe
from megatron_rft.data.images import PromptImages
from megatron_rft.data.prompts import as_batch
from megatron_rft.data.stream import Stream
from megatron_rft.training import build, loop
from megatron_rft.training.models import Models
from megatron_rft.training.problems import Problems
from megatron_rft.training.run import TrainingRun
from megatron_rft.training.stored import StoredBatches


def train(recipe: Recipe) -> int:
    """Train until run.steps, run.epochs or a signal. Returns the exit status."""
    tokenizer, hf_config = build.load_model_files(recipe.model, recipe.run.seed, recipe.lora)
    problems, limit = Problems(recipe.data, recipe.environment), recipe.rollout.max_response_tokens
    answers, dropped = problems.demonstrations(tokenizer, limit)
    evaluated = problems.of_evaluations(tokenizer)  # wrong rows of these show now, too
    stream, size = Stream(answers, recipe.run.seed, recipe.data.shuffle), recipe.algorithm.batch_sequences
    steps = recipe.run.steps or math.ceil(recipe.run.epochs * len(answers) / size)
    models = Models(build.Networks(hf_config, recipe).actor(steps, recipe.rollout.temperature))
    if recipe.data.image_field:
        models.see(PromptImages([answer.prompt for answer in answers]))
    with ExitStack() as stack:
        run = TrainingRun(recipe, tokenizer, models, stream, steps, stack, dropped, evaluated)
        return loop.train(run, StoredBatches(run, size, as_batch), models, objectives.build(recipe.algorithm))
