"""Training on given answers: supervised fine-tuning, the warm start of a reinforcement-learning run."""

import math
from contextlib import ExitStack, closing

import torch.distributed as dist

from megatron_rft import objectives
from megatron_rft.config import Recipe
from megatron_rft.data.prompts import as_batch, check_tokenizer, demonstration_set
from megatron_rft.data.stream import Stream
from megatron_rft.inference import weight_sync
from megatron_rft.megatron import weights
from megatron_rft.rewards import build as build_reward
from megatron_rft.training import build, engines
from megatron_rft.training.run import FINISHED, STOPPED, Run


def train(recipe: Recipe) -> int:
    """Steps until run.steps (or run.epochs) or a signal; returns the exit status."""
    engines.check_gpus(recipe)
    tokenizer, hf_config = build.load_tokenizer(recipe), build.load_hf_config(recipe)
    check_tokenizer(tokenizer, hf_config.vocab_size, recipe.model.path)
    form, limit = build.prompt_format(recipe, "train"), recipe.rollout.max_response_tokens
    found = demonstration_set(build.rows_of(recipe, "train"), tokenizer, form, "data.train", limit)
    stream = Stream(found.demonstrations, recipe.run.seed, recipe.data.shuffle)
    size = recipe.algorithm.batch_sequences
    steps = recipe.run.steps or math.ceil(recipe.run.epochs * len(found) / size)
    actor = build.build_actor(recipe, hf_config, steps)
    objective = objectives.build(recipe.algorithm)

    with ExitStack() as stack:
        run = stack.enter_context(closing(Run(recipe, {"actor": actor}, stream, steps)))
        state, done = run.restore(objective.init())
        run.note_dropped("data.train", found.dropped)
        evaluator = None
        if recipe.data.validation or recipe.data.test:
            reward = stack.enter_context(closing(build_reward(recipe.reward)))
            engine = stack.enter_context(closing(build.build_engine(recipe, hf_config)))
            evaluator = build.build_evaluator(recipe, engine, tokenizer, reward)

        for step in range(done + 1, steps + 1):
            batch = as_batch(stream.next(size))
            prepared = objective.prepare(batch, state)
            for update in prepared.updates:
                with run.phases("training"):
                    for mini_batch in update.steps():
                        run.optimizer_step(update, mini_batch, step)
            state = prepared.state
            metrics = prepared.metrics | {"tokens/trained": float(batch.lengths.sum())}
            if evaluator and run.evaluation_due(step):
                weight_sync.push(actor.stream(), engine, version=step)
                metrics |= run.evaluate_if_due(evaluator, step)
            if run.end_of_step(step, state, metrics):
                return STOPPED
        if evaluator and recipe.data.test:
            weight_sync.push(actor.stream(), engine, version=steps)
            after = run.evaluate_at_end(evaluator)
            if dist.get_rank() == 0:
                print(f"pass@1 {after['pass_at_1']:.2f} ± {after['standard_error']:.2f} ({after['problems']} problems)")
        weights.save_folder(actor.stream(), run.folder / "export", hf_config, build.tokenizer_folder(recipe))
        run.finish()
    return FINISHED
