"""Offline training: any method of objectives/offline on a store of trajectories. The loop is in `train`.

Every rank holds all trajectories (token ids and a few numbers each) and draws the same examples; the held-out problems
of the store are what validation asks, and the best model there is the one that is exported.
"""

import math
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rft import objectives
from megatron_rft.config import Recipe
from megatron_rft.conversion import fingerprint
from megatron_rft.data import trajectories as store
from megatron_rft.data.prompts import check_tokenizer
from megatron_rft.data.stream import Stream
from megatron_rft.data.trajectories import Stored
from megatron_rft.inference import weight_sync
from megatron_rft.megatron import weights
from megatron_rft.megatron.actor import Actor
from megatron_rft.objectives.base import Update
from megatron_rft.objectives.offline.base import Offline, part_of
from megatron_rft.records import Batch
from megatron_rft.rewards import build as build_reward
from megatron_rft.training import build
from megatron_rft.training.early_stopping import Selection
from megatron_rft.training.grad_norms import due, gradient_norms
from megatron_rft.training.offline_reference import Reference, check_cache
from megatron_rft.training.run import FINISHED, STOPPED, Run
from megatron_rft.utils.errors import DataError


def train(recipe: Recipe) -> int:
    """Steps until run.steps, run.epochs, evaluation.patience or a signal; returns the exit status."""
    tokenizer, hf_config = build.load_tokenizer(recipe), build.load_hf_config(recipe)
    check_tokenizer(tokenizer, hf_config.vocab_size, recipe.model.path)
    stored = store.read(recipe.data.train.path)
    check_store(recipe, stored)
    objective = objectives.build(recipe.algorithm)
    data = objective.annotate(store.to_batch(stored.train))
    examples = objective.examples(data)
    check_examples(recipe, data, examples)
    check_cache(recipe, stored.digest)
    stream, size = Stream(examples, recipe.run.seed, recipe.data.shuffle), examples_per_step(recipe, objective)
    steps = recipe.run.steps or math.ceil(recipe.run.epochs * len(examples) / size)
    actor = build.build_actor(recipe, hf_config, steps)
    reference = Reference(recipe, actor, data, stored.digest)
    data = reference.data(data)

    with ExitStack() as stack:
        run = stack.enter_context(closing(Run(recipe, {"actor": actor}, stream, steps)))
        evaluator = build_evaluator(recipe, hf_config, tokenizer, stored, stack)
        state, done = run.restore(objective.init())
        selection, state = Selection(recipe.evaluation.patience).out_of(state)
        if evaluator:
            weight_sync.push(actor.stream(), evaluator.engine, version=done)
            run.evaluate_at_start(evaluator)

        for step in range(done + 1, steps + 1):
            if selection.exhausted:
                break
            batch = draw(data, stream.next(size))
            with run.phases("logprobs"):
                batch = with_old_logprobs(batch, objective, actor)
            prepared = objective.prepare(batch, state)
            metrics = prepared.metrics | {"tokens/trained": float(batch.lengths.sum())}
            for update in prepared.updates:
                for mini_batch in update.steps():
                    if due(recipe.algorithm.part_norms_every, step):
                        with run.phases("part_norms"):
                            metrics |= part_norms(actor, update, mini_batch, reference)
                    with run.phases("training"):
                        run.optimizer_step(update, mini_batch, step, reference.second(update, mini_batch))
            state = prepared.state
            if evaluator and run.evaluation_due(step):
                weight_sync.push(actor.stream(), evaluator.engine, version=step)
                with run.phases("evaluation"):
                    found = evaluator("validation", step)
                metrics |= {"evaluation/pass@1": found["pass_at_1"], "evaluation/pass@1_se": found["standard_error"]}
                selection = keep_best(selection, found["pass_at_1"], step, run, actor, recipe)
            if selection.exhausted:
                run.total_steps = step  # so that the last checkpoint is written
            if run.end_of_step(step, selection.into(state), metrics):
                return STOPPED
        conclude(recipe, run, actor, evaluator, selection)
    return FINISHED


def examples_per_step(recipe: Recipe, objective: Offline) -> int:
    return recipe.algorithm.batch_sequences // (2 if objective.options.pairs else 1)


def check_store(recipe: Recipe, stored: Stored) -> None:
    """The trajectories are of this tokenizer, and there is something to evaluate on where that is asked for."""
    found = fingerprint.of_tokenizer(build.tokenizer_folder(recipe))
    if stored.index["facts"]["tokenizer_fingerprint"] != found:
        raise DataError(
            f"data.train: the trajectories in {recipe.data.train.path} are tokens of another tokenizer, that of "
            f"{stored.index['facts']['model']}. Set model.tokenizer to it, or generate trajectories with this one"
        )
    if recipe.evaluation.every and not stored.held_out:
        raise DataError(
            f"evaluation.every: the store {recipe.data.train.path} holds no problems out (generation.held_out): there "
            "is nothing to validate on. Set it to 0, or generate with a larger share"
        )


def check_examples(recipe: Recipe, data: Batch, examples: list[tuple[int, ...]]) -> None:
    """There are some, and each fits a micro-batch: what stays together is not torn."""
    if not examples:
        raise DataError(
            f"algorithm.name: {recipe.algorithm.name} finds nothing to learn from in {recipe.data.train.path}"
        )
    lengths = data.lengths.tolist()
    longest = max(sum(lengths[position] for position in example) for example in examples)
    if longest > recipe.batching.micro_batch_tokens:
        what = "pair" if len(examples[0]) == 2 else "trajectory"
        raise DataError(
            f"batching.micro_batch_tokens: the longest {what} has {longest} tokens, and does not fit "
            f"{recipe.batching.micro_batch_tokens}"
        )


def draw(data: Batch, examples: list[tuple[int, ...]]) -> Batch:
    """The trajectories of some examples; those of one example are a unit."""
    index = torch.tensor([position for example in examples for position in example])
    unit = torch.tensor([number for number, example in enumerate(examples) for _ in example])
    return data.select(index).with_sequences(unit=unit)


def with_old_logprobs(batch: Batch, objective: Offline, actor: Actor) -> Batch:
    """Those of the policy before the step, where the method needs them."""
    if "old_logprobs" not in objective.needs:
        return batch
    return batch.with_tokens(old_logprobs=actor.outputs(batch, frozenset({"logprobs"}))["logprobs"])


def part_norms(actor: Actor, update: Update, batch: Batch, reference: Reference) -> dict[str, float]:
    """The gradient's norm of right and of wrong trajectories (figure 8)."""
    parts = {f"dynamics/grad_norm_{part}": part_of(update.loss, part) for part in ("correct", "incorrect")}
    return gradient_norms(actor, update, batch, parts, lambda: reference.second(update, batch))


def build_evaluator(recipe: Recipe, hf_config: Any, tokenizer: Any, stored: Stored, stack: ExitStack):
    """Of the held-out problems and of data.test; None where there is nothing to ask."""
    if not recipe.validates and not recipe.data.test:
        return None
    reward = stack.enter_context(closing(build_reward(recipe.reward)))
    engine = stack.enter_context(closing(build.build_engine(recipe, hf_config)))
    return build.build_evaluator(recipe, engine, tokenizer, reward, validation=stored.held_out)


def keep_best(selection: Selection, accuracy: float, step: int, run: Run, actor: Actor, recipe: Recipe) -> Selection:
    """After an evaluation; a new best model replaces the one in RUN/best."""
    selection = selection.judged(accuracy, step)
    if selection.step == step:
        weights.save_folder(actor.stream(), best_folder(run), actor.hf_config, build.tokenizer_folder(recipe))
    return selection


def best_folder(run: Run) -> Path:
    return run.folder / "best"


def conclude(recipe: Recipe, run: Run, actor: Actor, evaluator, selection: Selection) -> None:
    """Export the best model, or the last where nothing was evaluated, and test it."""
    if selection.step:
        actor.load(weights.open_folder(best_folder(run), actor.hf_config))
        run.tracker.note(f"the best model is that of step {selection.step}: validation pass@1 {selection.best:.3f}")
    if evaluator and recipe.data.test:
        weight_sync.push(actor.stream(), evaluator.engine, version=selection.step or run.total_steps)
        after = evaluator("test", run.total_steps)
        if dist.get_rank() == 0:
            print(f"pass@1 {after['pass_at_1']:.2f} ± {after['standard_error']:.2f} ({after['problems']} problems)")
    weights.save_folder(actor.stream(), run.folder / "export", actor.hf_config, build.tokenizer_folder(recipe))
    run.finish()
