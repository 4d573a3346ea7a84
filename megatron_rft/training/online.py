"""Online reinforcement learning: the policy's engine samples batches, and a verifier grades them."""

from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron_rft import objectives
from megatron_rft.config import Recipe, Rollout
from megatron_rft.config.algorithms.base import Algorithm
from megatron_rft.data.prompts import PromptSet
from megatron_rft.data.rendering import PromptFormat, ask_again
from megatron_rft.data.stream import Stream
from megatron_rft.inference.engine import Engine
from megatron_rft.megatron.ema import MovingAverage
from megatron_rft.objectives.base import Objective, Setting, State, Update
from megatron_rft.objectives.mismatch import mismatch
from megatron_rft.objectives.plugins.dynamic import DynamicConstraint
from megatron_rft.objectives.plugins.pipo import PIPO
from megatron_rft.records import Batch, Prompt
from megatron_rft.rewards.base import Reward
from megatron_rft.rewards.registry import build as build_reward
from megatron_rft.rollout.feedback import Feedback, cutter
from megatron_rft.rollout.refiner import Refiner
from megatron_rft.rollout.sampler import Sampled, Sampler
from megatron_rft.rollout.scheduler import RolloutScheduler
from megatron_rft.tracking.phases import Phases
from megatron_rft.training import build, dynamic_constraint, loop, mismatch_alarm, sample_log, user_algorithm
from megatron_rft.training.engines import EngineBuilder, build_beside, engine_metrics, gather, rank_among_engines
from megatron_rft.training.models import OnlineModels
from megatron_rft.training.problems import Problems
from megatron_rft.training.run import Run
from megatron_rft.utils.errors import DataError


def train(recipe: Recipe) -> int:
    """Train until run.steps or a signal. Returns the exit status."""
    engines, problems, options = EngineBuilder.of(recipe), Problems.of(recipe), recipe.rollout
    engines.check_gpus()
    tokenizer, hf_config = build.load_model_files(recipe.model)
    found = problems.prompts("train", tokenizer)
    check_solutions(recipe.algorithm, found)
    stream = Stream(found.prompts, recipe.run.seed, recipe.data.shuffle)
    objective = build_objective(recipe)
    mismatch_alarm.check_bounds(recipe.faults, objective.needs)
    models = build_models(recipe, hf_config, objective)

    with ExitStack() as stack:
        reward = stack.enter_context(closing(build_reward(recipe.reward)))
        trained = list(models.trained.values())
        engine, weights = build_beside(trained, partial(engines.build, hf_config), options.offload_trainer)
        stack.enter_context(closing(engine))
        evaluator = build.build_evaluator(recipe, engine, tokenizer, reward)
        run = Run(recipe, models, stream, recipe.run.steps, evaluator, found.dropped)
        stack.enter_context(closing(run))
        examples = refiner = None
        if recipe.refines:
            # The refiner's engine is always in this process: recovery of engines in other processes is collective,
            # but each rank uses its refiner at different times.
            refining = stack.enter_context(closing(engines.build_refining(hf_config)))
            models.push_reference(refining)
            refiner = dynamic_constraint.build_refiner(recipe, engines, refining, reward, tokenizer, hf_config)
            examples = dynamic_constraint.Examples(recipe.constraint, run.folder, models.actor, tokenizer)
        scheduler = RolloutScheduler(
            build_sampler(recipe, engine, reward, tokenizer, refiner, run.phases),
            weights,
            stream.next,
            options.prompts_per_step,
            recipe.run.steps,
            options.staleness,
            objective.keep,
            recipe.algorithm.sampling_rounds,
            run.phases,
        )
        stack.enter_context(closing(scheduler))
        batches = OnlineBatches(run, scheduler, engine, found.prompts, tokenizer, refiner, examples)
        return loop.train(run, batches, models, objective)


@dataclass
class OnlineBatches(loop.Batches):
    """Batches from the scheduler, with their metrics, notes and samples."""

    run: Run
    scheduler: RolloutScheduler
    engine: Engine
    prompts: list[Prompt]
    tokenizer: Any
    refiner: Refiner | None = None
    examples: dynamic_constraint.Examples | None = None
    sampled: Sampled | None = None

    def restore(self, state: State) -> State:
        if self.examples:
            self.examples.resume(self.run.done)
        return self.scheduler.restore(state, self.prompts)

    def begin(self, step: int) -> bool:
        return self.scheduler.begin(step)

    def next(self, step: int) -> Batch:
        self.sampled = self.scheduler.next(step)
        if self.examples:
            with self.run.phases("logprobs"):
                self.examples.write(step, self.sampled.rollouts)
        return self.sampled.batch

    def publish(self, version: int, asked: bool, verify: bool = False) -> dict[str, float]:
        if self.scheduler.weights.sent(version):
            return {}
        return self.scheduler.publish(version, drain=asked, verify=verify)

    def report(self, step: int, batch: Batch, updates: list[Update]) -> dict[str, float]:
        tracker, rollouts = self.run.tracker, self.sampled.rollouts
        metrics = self.sampled.metrics | mismatch_metrics(batch) | {"tokens/trained": float(batch.lengths.sum())}
        metrics |= engine_metrics(self.engine, tracker.note)
        if self.refiner:
            metrics |= {f"refiner_{name}": value for name, value in self.refiner.engine.statistics().items()}
        tracker.example(str(rollouts[0]))
        if tracker.wants_samples(step):
            tracker.samples(step, sample_log.take(batch, updates, rollouts, self.tokenizer))
        if warning := underfilled_batch_warning(self.sampled.metrics, self.scheduler.count, step):
            tracker.note(warning)
        return metrics

    def state(self) -> State:
        return self.scheduler.state()


def build_objective(recipe: Recipe) -> Objective:
    """The algorithm of a recipe, wrapped in its plug-ins."""
    in_step = mini_batches(recipe.rollout, recipe.algorithm)
    setting = Setting(in_step, recipe.rollout.max_response_tokens, recipe.critic)
    if recipe.algorithm.of_user:
        objective = user_algorithm.build_objective(recipe.algorithm, setting, recipe.model.reference is not None)
    else:
        objective = objectives.build(recipe.algorithm, setting)
    if recipe.refines:
        objective = DynamicConstraint(objective, recipe.constraint)
    if recipe.pipo is not None:
        objective = PIPO(objective, recipe.pipo, recipe.rollout.staleness)
    return objective


def mini_batches(rollout: Rollout, algorithm: Algorithm) -> int:
    return rollout.prompts_per_step // (algorithm.mini_batch_prompts or rollout.prompts_per_step)


def build_models(recipe: Recipe, hf_config: Any, objective: Objective) -> OnlineModels:
    """The actor and the other networks that the objective needs."""
    # A learning rate schedule spans all optimizer steps of the run.
    optimizer_steps = mini_batches(recipe.rollout, recipe.algorithm) * recipe.algorithm.epochs
    critic_only = recipe.critic.warmup_steps if recipe.critic else 0
    own_moments = recipe.pipo is not None and recipe.pipo.optimizer_state == "own"
    moments = ("verification",) if own_moments else ()
    actor = build.build_actor(recipe, hf_config, (recipe.run.steps - critic_only) * optimizer_steps, moments)
    critic = reference = None
    if "values" in objective.needs:
        critic = build.build_critic(recipe, hf_config, recipe.run.steps * optimizer_steps)
    kl_every = recipe.constraint.kl_every if recipe.constraint else 0
    if objective.needs & {"ref_logprobs", "ref_kl", "reference"} or kl_every or recipe.refines:
        reference = build.reference_weights(recipe.model, recipe.run.seed, actor)
    rate = recipe.algorithm.teacher_average
    return OnlineModels(
        actor,
        objective.needs,
        dynamic_constraint.gradient_norms(recipe.constraint) if recipe.constraint else None,
        critic,
        reference,
        MovingAverage(actor, rate) if rate else None,
        recipe.algorithm.old_logprobs,
        kl_every,
    )


def build_sampler(
    recipe: Recipe, engine: Engine, reward: Reward, tokenizer: Any, refiner: Refiner | None, phases: Phases
) -> Sampler:
    options, form = recipe.rollout, Problems.of(recipe).prompt_format("train")
    rank, world = rank_among_engines(engine)
    background = recipe.trains_while_sampling
    return Sampler(
        engine,
        build.build_sampling(options, tokenizer),
        reward,
        tokenizer,
        group_size=options.group_size,
        seed=recipe.run.seed,
        gather=gather,
        rank=rank,
        world=world,
        on_error=recipe.reward.on_error,
        on_nonfinite=recipe.reward.on_nonfinite,
        contexts=build_feedback(recipe.algorithm, tokenizer, form) if recipe.algorithm.uses_feedback else None,
        refiner=refiner,
        phases=nullcontext if background else phases,  # phases belong to the trainer's thread
        background=background,
    )


def build_feedback(options: Algorithm, tokenizer: Any, form: PromptFormat) -> Feedback:
    ask = partial(ask_again, tokenizer=tokenizer, form=form)
    return Feedback(options, ask, cutter(tokenizer, options.max_feedback_tokens))


def check_solutions(options: Algorithm, prompts: PromptSet) -> None:
    """Check that rows have reference solutions if feedback uses them."""
    if not options.uses_feedback or "solution" not in options.feedback:
        return
    field = options.solution_field
    if not any(prompt.fields.get(field) for prompt in prompts.prompts):
        found = ", ".join(prompts.prompts[0].fields)
        raise DataError(
            f"algorithm.feedback: no row of data.train has a solution in its field {field!r} "
            f"(algorithm.solution_field); the first has {found}"
        )


def underfilled_batch_warning(metrics: dict[str, float], wanted: int, step: int) -> str | None:
    """The warning for a step whose sampling rounds ended before enough groups had unequal rewards."""
    kept, rounds = int(metrics["rollout/kept_groups"]), int(metrics["rollout/rounds"])
    if kept >= wanted:
        return None
    what = f"the step trains on these {kept}" if kept else "the last round is trained on as it is"
    return f"step {step}: {kept} of {wanted} groups have unequal rewards after {rounds} rounds of sampling; {what}"


def mismatch_metrics(batch: Batch) -> dict[str, float]:
    """Metrics of the train-inference mismatch; none if the trainer's log-probs are not computed before the step."""
    rollout, old = batch.tokens["rollout_logprobs"], batch.tokens.get("old_logprobs")
    return {} if old is None or old is rollout else mismatch(rollout, old, batch.response_mask)
