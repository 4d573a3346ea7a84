"""Online reinforcement learning: sample, grade, attribute, update, push the weights. The loop is in `train`.

Every rank runs this file. Whatever is small (the batch with its numbers per token) every rank holds whole, so that the
algorithm is plain code; whatever is large (weights, activations) lives under megatron_rft.megatron.
"""

from contextlib import ExitStack, closing

import torch.distributed as dist
from torch import Tensor

from megatron_rft import weight_sync
from megatron_rft.config import Recipe
from megatron_rft.data.prompts import check_tokenizer
from megatron_rft.data.stream import Stream
from megatron_rft.megatron import weights
from megatron_rft.megatron.actor import Actor
from megatron_rft.objectives import OBJECTIVES, PLUGINS
from megatron_rft.objectives.base import Objective, counts
from megatron_rft.objectives.mismatch import mismatch
from megatron_rft.records import Batch
from megatron_rft.rewards import build as build_reward
from megatron_rft.rollout.engine import Sampling
from megatron_rft.rollout.sampler import Sampler
from megatron_rft.trainers import assembly
from megatron_rft.trainers.lifecycle import FINISHED, STOPPED, Run

LOGPROBS = frozenset({"logprobs"})


def train(recipe: Recipe) -> int:
    """Steps until run.steps or a signal; returns the exit status."""
    tokenizer, hf_config = assembly.load_tokenizer(recipe), assembly.load_hf_config(recipe)
    check_tokenizer(tokenizer, hf_config.vocab_size, recipe.model.path)
    train_prompts = assembly.load_prompts(recipe, "train", tokenizer)
    stream = Stream(train_prompts.prompts, recipe.run.seed, recipe.data.shuffle)
    objective, options = build_objective(recipe), recipe.rollout
    actor = assembly.build_actor(recipe, hf_config, optimizer_steps(recipe))
    reference = reference_weights(recipe, actor, objective)

    with ExitStack() as stack:
        reward = stack.enter_context(closing(build_reward(recipe.reward)))
        engine = stack.enter_context(closing(assembly.build_engine(recipe, hf_config)))
        run = stack.enter_context(closing(Run(recipe, {"actor": actor}, stream, recipe.run.steps)))
        sampler = build_sampler(recipe, engine, reward, tokenizer)
        evaluator = assembly.build_evaluator(recipe, engine, tokenizer, reward)
        state, done = run.restore(objective.init())
        run.note_dropped("data.train", train_prompts.dropped)
        weight_sync.push(actor.stream(), engine, version=done, verify=True)
        before = run.evaluate_at_start(evaluator)
        phases = run.phases

        for step in range(done + 1, recipe.run.steps + 1):
            with phases("generation"):
                sampled = sampler.sample(stream.next, options.prompts_per_step, step, keep=objective.keep)
            with phases("logprobs"):
                batch = objective.extend(sampled.batch, None)
                batch = model_outputs(batch, objective, actor, reference, recipe.algorithm.old_logprobs)
            prepared = objective.prepare(batch, state)
            for update in prepared.updates:
                with phases("verification" if update.name == "verification" else "training"):
                    for mini_batch in update.steps():
                        run.optimizer_step(run.models[update.model], update, mini_batch, counts(mini_batch), step)
            state = prepared.state
            with phases("sync"):
                synced = weight_sync.push(actor.stream(), engine, version=step)
            metrics = sampled.metrics | mismatch_metrics(batch) | prepared.metrics | synced
            metrics["tokens/trained"] = float(batch.lengths.sum())
            metrics |= run.evaluate_if_due(evaluator, step)
            run.tracker.example(str(sampled.examples[0]))
            if run.end_of_step(step, state, metrics):
                return STOPPED
        after = run.evaluate_at_end(evaluator)
        weights.save_folder(actor.stream(), run.folder / "export", hf_config, assembly.tokenizer_folder(recipe))
        run.finish()
        if before and dist.get_rank() == 0:
            print(assembly.headline(before, after), flush=True)
    return FINISHED


def build_objective(recipe: Recipe) -> Objective:
    """The algorithm of a recipe, inside its plug-ins."""
    options = recipe.algorithm.model_dump(exclude={"name", "mini_batch_prompts", "old_logprobs"})
    objective = OBJECTIVES[recipe.algorithm.name](**options, mini_batches=mini_batches(recipe))
    if recipe.pipo is not None:
        objective = PLUGINS["pipo"](objective, **recipe.pipo.model_dump())
    return objective


def mini_batches(recipe: Recipe) -> int:
    prompts = recipe.rollout.prompts_per_step
    return prompts // (recipe.algorithm.mini_batch_prompts or prompts)


def optimizer_steps(recipe: Recipe) -> int:
    """Of the whole run: the length of the learning rate's schedule."""
    return recipe.run.steps * mini_batches(recipe) * recipe.algorithm.epochs


def build_sampler(recipe: Recipe, engine, reward, tokenizer) -> Sampler:
    options = recipe.rollout
    sampling = Sampling(
        max_tokens=options.max_response_tokens,
        temperature=options.temperature,
        stop_token_ids=assembly.stop_token_ids(recipe, tokenizer),
    )
    return Sampler(
        engine,
        sampling,
        reward,
        tokenizer,
        group_size=options.group_size,
        seed=recipe.run.seed,
        gather=assembly.gather,
        rank=dist.get_rank(),
        world=dist.get_world_size(),
        on_error=recipe.reward.on_error,
    )


def reference_weights(recipe: Recipe, actor: Actor, objective: Objective) -> list[Tensor] | None:
    """The frozen reference in host memory, where the objective needs one: the weights that this run starts from, or
    model.reference."""
    if "ref_logprobs" not in objective.needs:
        return None
    if recipe.model.reference is None:
        return actor.snapshot()
    actor.load(weights.open_folder(assembly.local_folder(recipe.model.reference, "model.reference"), actor.hf_config))
    reference = actor.snapshot()
    actor.load(assembly.start_weights(recipe, actor.hf_config))
    return reference


def model_outputs(batch: Batch, objective: Objective, actor: Actor, reference: list[Tensor] | None, old: str) -> Batch:
    """The batch with what `objective.needs` of the models; each is one forward pass without gradients."""
    if old == "rollout":
        batch = batch.with_tokens(old_logprobs=batch.tokens["rollout_logprobs"])
    elif "old_logprobs" in objective.needs:
        batch = batch.with_tokens(old_logprobs=actor.outputs(batch, LOGPROBS)["logprobs"])
    if reference is not None:
        with actor.swapped(reference):
            batch = batch.with_tokens(ref_logprobs=actor.outputs(batch, LOGPROBS)["logprobs"])
    return batch


def mismatch_metrics(batch: Batch) -> dict[str, float]:
    """Nothing where the engine's log-probs are taken as they are: there is then nothing to compare them with."""
    rollout, old = batch.tokens["rollout_logprobs"], batch.tokens.get("old_logprobs")
    return {} if old is None or old is rollout else mismatch(rollout, old, batch.response_mask)
