"""Online reinforcement learning: sample, grade, attribute, update, push the weights. The loop is in `train`.

Every rank runs this file. Whatever is small (the batch with its numbers per token) every rank holds whole, so that the
algorithm is plain code; whatever is large (weights, activations) lives under megatron_rft.megatron.
"""

from contextlib import ExitStack, closing, nullcontext
from functools import partial
from typing import Any

import torch.distributed as dist

from megatron_rft import objectives
from megatron_rft.config import Recipe
from megatron_rft.data.prompts import PromptSet, ask_again, check_tokenizer
from megatron_rft.data.stream import Stream
from megatron_rft.inference.engine import Engine, Sampling
from megatron_rft.megatron import weights
from megatron_rft.objectives.base import Objective, Setting
from megatron_rft.objectives.mismatch import mismatch
from megatron_rft.objectives.plugins.dynamic import DynamicConstraint
from megatron_rft.objectives.plugins.pipo import PIPO
from megatron_rft.records import Batch
from megatron_rft.rewards import Reward
from megatron_rft.rewards import build as build_reward
from megatron_rft.rollout.feedback import Feedback, cutter
from megatron_rft.rollout.refiner import Refiner
from megatron_rft.rollout.sampler import Sampler
from megatron_rft.rollout.scheduler import Ahead
from megatron_rft.tracking.phases import Phases
from megatron_rft.training import build, dynamic_constraint, engines, mismatch_alarm, sample_log, user_algorithm
from megatron_rft.training.models import Models
from megatron_rft.training.run import FINISHED, STOPPED, Run
from megatron_rft.utils.errors import DataError


def train(recipe: Recipe) -> int:
    """Steps until run.steps or a signal; returns the exit status."""
    engines.check_gpus(recipe)
    tokenizer, hf_config = build.load_tokenizer(recipe), build.load_hf_config(recipe)
    check_tokenizer(tokenizer, hf_config.vocab_size, recipe.model.path)
    train_prompts = build.load_prompts(recipe, "train", tokenizer)
    check_solutions(recipe, train_prompts)
    stream = Stream(train_prompts.prompts, recipe.run.seed, recipe.data.shuffle)
    objective, options = build_objective(recipe), recipe.rollout
    mismatch_alarm.check_bounds(recipe.faults, objective.needs)
    models = Models(recipe, hf_config, objective, *optimizer_steps(recipe))
    actor = models.actor

    with ExitStack() as stack:
        reward = stack.enter_context(closing(build_reward(recipe.reward)))
        engine = stack.enter_context(closing(build.build_engine(recipe, hf_config)))
        run = stack.enter_context(closing(Run(recipe, models.trained, stream, recipe.run.steps, models.averages)))
        refiner = build_refiner(recipe, models, reward, tokenizer, hf_config, stack)
        ahead = Ahead(
            build_sampler(recipe, engine, reward, tokenizer, refiner, run.phases),
            stream.next,
            options.prompts_per_step,
            recipe.run.steps,
            options.staleness,
            objective.keep,
            recipe.algorithm.sampling_rounds,
        )
        stack.enter_context(closing(ahead))
        evaluator = build.build_evaluator(recipe, engine, tokenizer, reward)
        state, done = run.restore(objective.init())
        state = ahead.restore(state, train_prompts.prompts)
        examples = (
            dynamic_constraint.Examples(recipe, actor, tokenizer, done, dist.get_rank() == 0) if refiner else None
        )
        run.note_dropped("data.train", train_prompts.dropped)
        sync = engines.Sync(actor, engine, version=done)
        sync.push(verify=True)
        before = run.evaluate_at_start(evaluator)
        phases = run.phases

        for step in range(done + 1, recipe.run.steps + 1):
            with phases("generation"):
                sampled = ahead.next(step)
            sync.rest()
            with phases("logprobs"):
                batch = models.outputs(sampled.batch, recipe.algorithm.old_logprobs)
                measured = dynamic_constraint.measured_kl(recipe, models, batch, step)
                if examples:
                    examples.write(step, sampled.rollouts)
            prepared = objective.prepare(batch, state)
            for update in prepared.updates:
                for mini_batch in update.steps():
                    second = models.second(update, mini_batch)
                    if dynamic_constraint.norms_due(recipe, update, step):
                        with phases("part_norms"):
                            measured |= dynamic_constraint.part_norms(actor, update, mini_batch, second)
                    with phases("verification" if update.name == "verification" else "training"):
                        run.optimizer_step(update, mini_batch, step, second)
            models.end_of_step()
            state, sync.version = prepared.state, step
            with phases("generation"):
                ahead.settle(everything=run.evaluation_due(step))
            with phases("sync"):
                every = recipe.faults.compare_weights_every
                synced = sync.push(verify=bool(every) and step % every == 0)
            metrics = sampled.metrics | mismatch_metrics(batch) | prepared.metrics | synced | measured
            metrics["tokens/trained"] = float(batch.lengths.sum())
            metrics |= run.evaluate_if_due(evaluator, step)
            run.tracker.example(str(sampled.rollouts[0]))
            if run.tracker.wants_samples(step):
                run.tracker.samples(step, sample_log.take(batch, prepared.updates, sampled.rollouts, tokenizer))
            metrics |= engines.losses(engine, run.tracker.note) | engine.statistics()
            if refiner:
                metrics |= {f"refiner_{name}": value for name, value in refiner.engine.statistics().items()}
            if short := note_of_shortage(sampled.metrics, options.prompts_per_step, step):
                run.tracker.note(short)
            if run.end_of_step(step, state, metrics, ahead.state):
                return STOPPED
        after = run.evaluate_at_end(evaluator)
        weights.save_folder(actor.stream(), run.folder / "export", hf_config, build.tokenizer_folder(recipe))
        run.finish()
        if before and dist.get_rank() == 0:
            print(build.headline(before, after), flush=True)
    return FINISHED


def build_objective(recipe: Recipe) -> Objective:
    """The algorithm of a recipe, inside its plug-ins."""
    setting = Setting(mini_batches(recipe), recipe.rollout.max_response_tokens, recipe.critic)
    of_user = recipe.algorithm.of_user
    objective = (
        user_algorithm.build_objective(recipe, setting) if of_user else objectives.build(recipe.algorithm, setting)
    )
    if recipe.refines:
        objective = DynamicConstraint(objective, recipe.constraint)
    if recipe.pipo is not None:
        objective = PIPO(objective, recipe.pipo, recipe.rollout.staleness)
    return objective


def mini_batches(recipe: Recipe) -> int:
    prompts = recipe.rollout.prompts_per_step
    return prompts // (recipe.algorithm.mini_batch_prompts or prompts)


def optimizer_steps(recipe: Recipe) -> tuple[int, int]:
    """Of the whole run, the policy's and the critic's: the lengths of the learning rates' schedules."""
    in_a_step = mini_batches(recipe) * recipe.algorithm.epochs
    alone = recipe.critic.warmup_steps if recipe.critic else 0
    return (recipe.run.steps - alone) * in_a_step, recipe.run.steps * in_a_step


def build_refiner(
    recipe: Recipe, models: Models, reward: Reward, tokenizer: Any, hf_config: Any, stack: ExitStack
) -> Refiner | None:
    """With an engine of its own, which holds the reference from here to the end of the run."""
    if not recipe.refines:
        return None
    # Here whatever rollout.placement says: engines in processes of their own recover from losses all together, and the
    # refiner is at work at times of each rank's own.
    engine = stack.enter_context(closing(build.build_refining_engine(recipe, hf_config)))
    models.push_reference(engine)
    return dynamic_constraint.build_refiner(recipe, engine, reward, tokenizer, hf_config)


def build_sampler(
    recipe: Recipe, engine: Engine, reward: Reward, tokenizer: Any, refiner: Refiner | None, phases: Phases
) -> Sampler:
    options = recipe.rollout
    sampling = Sampling(
        max_tokens=options.max_response_tokens,
        temperature=options.temperature,
        stop_token_ids=build.stop_token_ids(recipe, tokenizer),
    )
    rank, world = engines.place(engine)
    return Sampler(
        engine,
        sampling,
        reward,
        tokenizer,
        group_size=options.group_size,
        seed=recipe.run.seed,
        gather=build.gather,
        rank=rank,
        world=world,
        on_error=recipe.reward.on_error,
        on_nonfinite=recipe.reward.on_nonfinite,
        contexts=build_feedback(recipe, tokenizer) if recipe.algorithm.uses_feedback else None,
        refiner=refiner,
        phases=nullcontext if options.staleness else phases,  # of a thread beside the step's
        background=options.staleness > 0,
    )


def build_feedback(recipe: Recipe, tokenizer: Any) -> Feedback:
    options = recipe.algorithm
    return Feedback(
        tuple(options.feedback),
        partial(ask_again, tokenizer=tokenizer, form=build.prompt_format(recipe, "train")),
        cutter(tokenizer, options.max_feedback_tokens),
        options.teacher_template,
        options.solution_template,
        options.error_template,
        options.solution_field,
    )


def check_solutions(recipe: Recipe, prompts: PromptSet) -> None:
    """Reference solutions are there, where they are a source of feedback."""
    if not recipe.algorithm.uses_feedback or "solution" not in recipe.algorithm.feedback:
        return
    field = recipe.algorithm.solution_field
    if not any(prompt.fields.get(field) for prompt in prompts.prompts):
        found = ", ".join(prompts.prompts[0].fields)
        raise DataError(
            f"algorithm.feedback: no row of data.train has a solution in its field {field!r} "
            f"(algorithm.solution_field); the first has {found}"
        )


def note_of_shortage(metrics: dict[str, float], wanted: int, step: int) -> str | None:
    """When the rounds of sampling ran out before there were enough groups worth training on."""
    kept, rounds = int(metrics["rollout/kept_groups"]), int(metrics["rollout/rounds"])
    if kept >= wanted:
        return None
    what = f"the step trains on these {kept}" if kept else "the last round is trained on as it is"
    return f"step {step}: {kept} of {wanted} groups have unequal rewards after {rounds} rounds of sampling; {what}"


def mismatch_metrics(batch: Batch) -> dict[str, float]:
    """Nothing where the engine's log-probs are taken as they are: there is then nothing to compare them with."""
    rollout, old = batch.tokens["rollout_logprobs"], batch.tokens.get("old_logprobs")
    return {} if old is None or old is rollout else mismatch(rollout, old, batch.response_mask)
