"""Online reinforcement learning: sample, grade, attribute, update, push the weights. The loop is `train`.

Every rank runs this file. Whatever is small (the batch with its per-token numbers) every rank holds whole, so the
algorithm is plain code; whatever is large (weights, activations) lives under megatron_rft.megatron.
"""

from megatron_rft import weight_sync
from megatron_rft.config import Recipe
from megatron_rft.objectives import OBJECTIVES, PLUGINS
from megatron_rft.objectives.base import Objective, counts
from megatron_rft.objectives.mismatch import mismatch
from megatron_rft.records import Batch
from megatron_rft.trainers.assembly import Assembly
from megatron_rft.trainers.lifecycle import FINISHED, STOPPED


def build_objective(recipe: Recipe) -> Objective:
    """The algorithm of a recipe, inside its plug-ins."""
    options = recipe.algorithm.model_dump(exclude={"name", "mini_batch_prompts", "old_logprobs"})
    prompts = recipe.rollout.prompts_per_step
    mini_batches = prompts // (recipe.algorithm.mini_batch_prompts or prompts)
    objective = OBJECTIVES[recipe.algorithm.name](**options, mini_batches=mini_batches)
    if recipe.pipo is not None:
        objective = PLUGINS["pipo"](objective, **recipe.pipo.model_dump())
    return objective


def model_outputs(batch: Batch, objective: Objective, parts: Assembly, old_from_rollout: bool) -> Batch:
    """The batch with what `objective.needs` of the models: each is one forward pass without gradients."""
    if "old_logprobs" in objective.needs:
        if old_from_rollout:
            batch = batch.with_tokens(old_logprobs=batch.tokens["rollout_logprobs"])
        else:
            found = parts.actor.outputs(batch, frozenset({"logprobs"}))
            batch = batch.with_tokens(old_logprobs=found["logprobs"])
    if "ref_logprobs" in objective.needs:
        with parts.actor.swapped(parts.reference):
            batch = batch.with_tokens(ref_logprobs=parts.actor.outputs(batch, frozenset({"logprobs"}))["logprobs"])
    return batch


def train(recipe: Recipe, parts: Assembly) -> int:
    """Steps until run.steps or a signal; returns the exit status."""
    objective = build_objective(recipe)
    phases, patience, rollout = parts.phases, parts.patience, recipe.rollout
    old_from_rollout = recipe.algorithm.old_logprobs == "rollout"
    state, start = parts.restore(objective.init())
    weight_sync.push(parts.actor.stream(), parts.engine, version=start, verify=True)
    parts.evaluate_at_start(start)

    for step in range(start, recipe.run.steps):
        with phases("generation"):
            sampled = parts.sampler.sample(parts.prompts.next, rollout.prompts_per_step, step, keep=objective.keep)
        metrics = dict(sampled.metrics)

        with phases("logprobs"):
            batch = objective.extend(sampled.batch, parts)
            batch = model_outputs(batch, objective, parts, old_from_rollout)
        if not old_from_rollout and "old_logprobs" in objective.needs:
            metrics |= mismatch(batch.tokens["rollout_logprobs"], batch.tokens["old_logprobs"], batch.response_mask)

        prepared = objective.prepare(batch, state)
        metrics |= prepared.metrics
        for update in prepared.updates:
            with phases("verification" if update.name == "verification" else "training"):
                for mini_batch in update.steps():
                    found = parts.models[update.model].step(
                        mini_batch, update.loss, counts(mini_batch), update.outputs, update.learning_rate
                    )
                    patience.note(found, mini_batch, step + 1)
                    parts.averages.add(update.name, found)
        state = prepared.state

        with phases("sync"):
            weight_sync.push(parts.actor.stream(), parts.engine, version=step + 1)
        status = parts.end_of_step(step + 1, state, metrics, trained_tokens=int(batch.lengths.sum()))
        if status == STOPPED:
            return STOPPED
    parts.finish(state)
    return FINISHED
