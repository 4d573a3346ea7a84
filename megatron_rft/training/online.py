"""Online reinforcement learning: the policy's engine samples batches, and a verifier grades them."""

from collections.abc import Callable
from contextlib import ExitStack, closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from megatron_rft import objectives
from megatron_rft.config import Recipe, Rollout
from megatron_rft.config.algorithms.base import Algorithm
from megatron_rft.data.images import ALBUM, PromptImages
from megatron_rft.data.prompts import PromptSet
from megatron_rft.data.rendering import ask_again
from megatron_rft.data.stream import Stream
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
from megatron_rft.rewards.registry import build as build_reward
from megatron_rft.rollout.feedback import Feedback
from megatron_rft.rollout.routes import RouteStore
from megatron_rft.rollout.sampler import Sampler
from megatron_rft.training import build, dynamic_constraint, loop, user_algorithm
from megatron_rft.training.engines import EngineBuilder
from megatron_rft.training.episodes import around
from megatron_rft.training.evaluator import Evaluator
from megatron_rft.training.models import EarlyVerification, Models
from megatron_rft.training.online_batches import OnlineBatches
from megatron_rft.training.problems import Problems
from megatron_rft.training.run import TrainingRun
from megatron_rft.training.teacher import Teachers, by_row, check_images
from megatron_rft.utils.errors import DataError


def train(recipe: Recipe) -> int:
    """Train until run.steps or a signal. Returns the exit status."""
    engines, options, algorithm = EngineBuilder(recipe), recipe.rollout, recipe.algorithm
    engines.check_gpus()
    tokenizer, hf_config = build.load_model_files(recipe.model, recipe.run.seed, recipe.lora, recipe.teaching)
    if recipe.data.image_field:
        check_images(recipe.teaching, build.tokenizer_folder(recipe.model))
    problems = Problems(recipe.data, recipe.environment)
    prompts = problems.prompts("train", tokenizer)
    encode = partial(ask_again, tokenizer=tokenizer, form=problems.prompt_format("train"))
    feedback = build_feedback(algorithm, tokenizer, encode, prompts) if algorithm.uses_feedback else None
    stream = Stream(prompts.prompts, recipe.run.seed, recipe.data.shuffle)
    objective = build_objective(recipe)
    rows = ((prompt.index, prompt.fields) for prompt in prompts.prompts)
    of_row = by_row(recipe.teaching, recipe.data.teacher_field, rows)
    models = build_models(recipe, hf_config, objective, of_row)
    if recipe.data.image_field:
        models.see(PromptImages(prompts.prompts, Path(recipe.run.output_dir) / ALBUM))
    routes = replayed_routes(recipe.rollout, hf_config, models.actor)

    with ExitStack() as stack:
        reward = stack.enter_context(closing(build_reward(recipe.reward)))
        engine, weights = engines.build_beside(list(models.trained.values()))
        player = around(engine, engines, tokenizer, stack, None if routes else weights)
        graded = build.evaluation_sampler(recipe.evaluation, options, player, tokenizer, reward, recipe.run.seed)
        folder, driver = Path(recipe.run.output_dir) / "evaluation", player.driver()
        evaluator = Evaluator(recipe.evaluation, problems, graded, folder, parallel.gather, *driver)
        run = TrainingRun(recipe, models, stream, recipe.run.steps, evaluator, prompts.dropped)
        stack.enter_context(closing(run))
        pairs = refiner = None
        if recipe.refines:
            template = recipe.constraint.template_text(recipe.reward.kind)
            refiner = dynamic_constraint.build_refiner(
                engines, models, tokenizer, encode, template, reward.maximum, recipe.run.seed, stack
            )
            pairs = partial(dynamic_constraint.shown_pairs, actor=models.actor, tokenizer=tokenizer)
        background = recipe.trains_while_sampling
        sampler = Sampler(
            player,
            build.build_sampling(options, tokenizer, routes=routes is not None),
            reward,
            tokenizer,
            options.group_size,
            recipe.run.seed,
            keep=objective.keep,
            max_rounds=algorithm.sampling_rounds,
            gather=parallel.gather,
            gather_on_main=parallel.gather_on_main,
            driver=driver,
            contexts=feedback,
            refiner=refiner,
            phases=nullcontext if background else run.phases,  # phases belong to the trainer's thread
            background=background,
            routes=routes,
        )
        batches = OnlineBatches(run, sampler, weights, options.prompts_per_step, options.staleness, pairs)
        stack.enter_context(closing(batches))
        return loop.train(run, batches, models, objective)


def build_objective(recipe: Recipe) -> Objective:
    """The algorithm of a recipe, wrapped in its plug-ins."""
    in_step = recipe.algorithm.mini_batches(recipe.rollout.prompts_per_step)
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


def build_models(recipe: Recipe, hf_config: Any, objective: Objective, of_row: dict[int, str]) -> Models:
    """The actor and the other networks that the objective needs. `of_row`: teachers' names, of several."""
    # A learning rate schedule spans all optimizer steps of the run.
    optimizer_steps = recipe.algorithm.mini_batches(recipe.rollout.prompts_per_step) * recipe.algorithm.epochs
    critic_only = recipe.critic.warmup_steps if recipe.critic else 0
    own_moments = recipe.pipo is not None and recipe.pipo.optimizer_state == "own"
    moments = ("verification",) if own_moments else ()
    networks = build.Networks(hf_config, recipe)
    total_steps = recipe.run.steps * optimizer_steps
    actor = networks.actor(total_steps - critic_only * optimizer_steps, recipe.rollout.temperature, moments)
    critic = reference = None
    if "values" in objective.needs:
        critic = networks.critic(recipe.critic, total_steps, actor)
    kl_every = recipe.constraint.kl_every if recipe.constraint else 0
    if objective.needs & {"ref_logprobs", "ref_kl", "reference"} or kl_every or recipe.refines:
        reference = build.reference_weights(recipe.model, recipe.run.seed, actor)
    rate, teaching = recipe.algorithm.teacher_average, recipe.teaching
    return Models(
        actor,
        objective.needs,
        verification=EarlyVerification(objective, actor) if recipe.pipo else None,
        critic=critic,
        reference=reference,
        teacher=MovingAverage(actor, rate) if rate else None,
        given=teaching and Teachers(teaching, of_row, actor, recipe.megatron, recipe.model.precision),
        old_logprobs=recipe.algorithm.old_logprobs,
        kl_every=kl_every,
        norms_every=recipe.constraint.norms_every if recipe.refines else 0,
    )


def replayed_routes(options: Rollout, hf_config: Any, actor: Actor) -> RouteStore | None:
    """The store of the engine's experts, which the actor replays; None: it chooses its own."""
    shape = ModelShape(hf_config.to_dict())
    if why_not_replayed(options, shape, choose_for(options, shape).name):
        return None
    routes = RouteStore.of(hf_config)
    actor.routers.replay(routes)
    return routes


def build_feedback(options: Algorithm, tokenizer: Any, encode: Callable, prompts: PromptSet) -> Feedback:
    """SDPO's feedback. Some row must have a reference solution if the feedback uses them."""
    field = options.solution_field
    if "solution" in options.feedback and not any(prompt.fields.get(field) for prompt in prompts.prompts):
        names = ", ".join(prompts.prompts[0].fields)
        raise DataError(
            f"algorithm.feedback: no row of data.train has a solution in its field {field!r} "
            f"(algorithm.solution_field); the first has {names}"
        )
    return Feedback(options, encode, tokenizer)
