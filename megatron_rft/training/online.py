"""Online reinforcement learning: the policy's engine samples batches, and a verifier grades them."""

from contextlib import ExitStack, closing, nullcontext
from functools import partial
from typing import Any

from megatron_rft import objectives
from megatron_rft.config import Recipe, Rollout
from megatron_rft.config.algorithms.base import Algorithm
from megatron_rft.data.prompts import PromptSet
from megatron_rft.data.rendering import PromptFormat, ask_again
from megatron_rft.data.stream import Stream
from megatron_rft.inference.engine import Engine
from megatron_rft.megatron import parallel
from megatron_rft.megatron.actor import Actor
from megatron_rft.megatron.ema import MovingAverage
from megatron_rft.objectives.base import Objective, Setting
from megatron_rft.objectives.plugins.distil import Distilled
from megatron_rft.objectives.plugins.dynamic import DynamicConstraint
from megatron_rft.objectives.plugins.pipo import PIPO
from megatron_rft.plan.model_shape import ModelShape
from megatron_rft.plan.routes import why_not_replayed
from megatron_rft.plan.vllm import choose_for
from megatron_rft.rewards.base import Reward
from megatron_rft.rewards.registry import build as build_reward
from megatron_rft.rollout.feedback import Feedback, cutter
from megatron_rft.rollout.refiner import Refiner
from megatron_rft.rollout.routes import RouteStore
from megatron_rft.rollout.sampler import Sampler
from megatron_rft.tracking.throughput import Phases
from megatron_rft.training import build, dynamic_constraint, loop, user_algorithm
from megatron_rft.training.engines import EngineBuilder, build_beside
from megatron_rft.training.episodes import around
from megatron_rft.training.models import EarlyVerification, OnlineModels
from megatron_rft.training.monitor import check_mismatch_bounds
from megatron_rft.training.online_batches import OnlineBatches
from megatron_rft.training.problems import Problems
from megatron_rft.training.run import TrainingRun
from megatron_rft.training.teacher import by_row, teachers_of
from megatron_rft.utils.errors import DataError


def train(recipe: Recipe) -> int:
    """Train until run.steps or a signal. Returns the exit status."""
    engines, problems, options = EngineBuilder.of(recipe), Problems.of(recipe), recipe.rollout
    engines.check_gpus()
    tokenizer, hf_config = build.load_model_files(recipe.model, recipe.run.seed, recipe.lora, recipe.teaching)
    prompts = problems.prompts("train", tokenizer)
    check_solutions(recipe.algorithm, prompts)
    stream = Stream(prompts.prompts, recipe.run.seed, recipe.data.shuffle)
    objective = build_objective(recipe)
    check_mismatch_bounds(recipe.faults, objective.needs)
    rows = ((prompt.index, prompt.fields) for prompt in prompts.prompts)
    of_row = by_row(recipe.teaching, recipe.data.teacher_field, rows)
    models = build_models(recipe, hf_config, objective, of_row)
    routes = replayed_routes(recipe.rollout, hf_config, models.actor)

    with ExitStack() as stack:
        reward = stack.enter_context(closing(build_reward(recipe.reward)))
        trained = list(models.trained.values())
        engine, weights = build_beside(trained, partial(engines.build, hf_config), options.offload_trainer)
        player = around(engine, engines, tokenizer, stack)
        evaluator = build.build_evaluator(recipe, player, tokenizer, reward)
        run = TrainingRun(recipe, models, stream, recipe.run.steps, evaluator, prompts.dropped)
        stack.enter_context(closing(run))
        examples = refiner = None
        if recipe.refines:
            # The refiner's engine is always in this process: recovery of engines in other processes is collective,
            # but each rank uses its refiner at different times.
            refining = stack.enter_context(closing(engines.build_refining(hf_config)))
            models.send_reference(refining)
            refiner = dynamic_constraint.build_refiner(recipe, engines, refining, reward, tokenizer, hf_config)
            examples = dynamic_constraint.Examples(recipe.constraint, run.folder, models.actor, tokenizer)
        batches = OnlineBatches(
            run,
            build_sampler(recipe, player, reward, tokenizer, objective, refiner, run.phases, routes),
            weights,
            prompts_per_step=options.prompts_per_step,
            staleness=options.staleness,
            examples=examples,
        )
        stack.enter_context(closing(batches))
        return loop.train(run, batches, models, objective)


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
    if recipe.distil:
        objective = Distilled(objective, recipe.distil)
    if recipe.pipo is not None:
        objective = PIPO(objective, recipe.pipo, recipe.rollout.staleness, recipe.algorithm.old_logprobs)
    return objective


def mini_batches(rollout: Rollout, algorithm: Algorithm) -> int:
    return rollout.prompts_per_step // (algorithm.mini_batch_prompts or rollout.prompts_per_step)


def build_models(
    recipe: Recipe, hf_config: Any, objective: Objective, of_row: dict[int, str] | None = None
) -> OnlineModels:
    """The actor and the other networks that the objective needs. `of_row`: teachers' names, of several."""
    # A learning rate schedule spans all optimizer steps of the run.
    optimizer_steps = mini_batches(recipe.rollout, recipe.algorithm) * recipe.algorithm.epochs
    critic_only = recipe.critic.warmup_steps if recipe.critic else 0
    own_moments = recipe.pipo is not None and recipe.pipo.optimizer_state == "own"
    moments = ("verification",) if own_moments else ()
    actor = build.build_actor(recipe, hf_config, (recipe.run.steps - critic_only) * optimizer_steps, moments)
    critic = reference = None
    if "values" in objective.needs:
        critic = build.build_critic(recipe, hf_config, recipe.run.steps * optimizer_steps, actor)
    kl_every = recipe.constraint.kl_every if recipe.constraint else 0
    if objective.needs & {"ref_logprobs", "ref_kl", "reference"} or kl_every or recipe.refines:
        reference = build.reference_weights(recipe.model, recipe.run.seed, actor)
    rate = recipe.algorithm.teacher_average
    return OnlineModels(
        actor,
        objective.needs,
        norms=dynamic_constraint.gradient_norms(recipe.constraint) if recipe.refines else None,
        verification=EarlyVerification(objective, actor) if recipe.pipo else None,
        critic=critic,
        reference=reference,
        teacher=MovingAverage(actor, rate) if rate else None,
        distilled=teachers_of(recipe.teaching, of_row or {}, actor, recipe.megatron, recipe.model.precision),
        old_logprobs=recipe.algorithm.old_logprobs,
        kl_every=kl_every,
    )


def build_sampler(
    recipe: Recipe,
    engine: Engine,
    reward: Reward,
    tokenizer: Any,
    objective: Objective,
    refiner: Refiner | None,
    phases: Phases,
    routes: RouteStore | None,
) -> Sampler:
    options, form = recipe.rollout, Problems.of(recipe).prompt_format("train")
    rank, world = engine.driver()
    background = recipe.trains_while_sampling
    return Sampler(
        engine,
        build.build_sampling(options, tokenizer, routes=routes is not None),
        reward,
        tokenizer,
        group_size=options.group_size,
        seed=recipe.run.seed,
        keep=objective.keep,
        max_rounds=recipe.algorithm.sampling_rounds,
        gather=parallel.gather,
        gather_on_main=parallel.gather_on_main,
        rank=rank,
        world=world,
        on_error=recipe.reward.on_error,
        on_nonfinite=recipe.reward.on_nonfinite,
        contexts=build_feedback(recipe.algorithm, tokenizer, form) if recipe.algorithm.uses_feedback else None,
        refiner=refiner,
        phases=nullcontext if background else phases,  # phases belong to the trainer's thread
        background=background,
        routes=routes,
    )


def replayed_routes(options: Rollout, hf_config: Any, actor: Actor) -> RouteStore | None:
    """The store of the engine's experts, which the actor replays; None: it chooses its own."""
    shape = ModelShape.of(hf_config.to_dict())
    if why_not_replayed(options, shape, choose_for(options, shape).name):
        return None
    routes = RouteStore.of(hf_config)
    actor.routers.replay(routes)
    return routes


def build_feedback(options: Algorithm, tokenizer: Any, form: PromptFormat) -> Feedback:
    ask = partial(ask_again, tokenizer=tokenizer, form=form)
    return Feedback(options, ask, cutter(tokenizer, options.max_feedback_tokens))


def check_solutions(options: Algorithm, prompts: PromptSet) -> None:
    """Check that rows have reference solutions if feedback uses them."""
    if not options.uses_feedback or "solution" not in options.feedback:
        return
    field = options.solution_field
    if not any(prompt.fields.get(field) for prompt in prompts.prompts):
        names = ", ".join(prompts.prompts[0].fields)
        raise DataError(
            f"algorithm.feedback: no row of data.train has a solution in its field {field!r} "
            f"(algorithm.solution_field); the first has {names}"
        )
