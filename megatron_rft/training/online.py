"""Online reinforcement learning: the policy's engine samples batches, and a verifier grades them."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from megatron_rft import objectives
from megatron_rft.config import Recipe, Rollout
from megatron_rft.config import plugins as section
from megatron_rft.config.algorithms.base import Algorithm, Online
from megatron_rft.config.algorithms.online import Setting
from megatron_rft.config.constraint import DynamicOptions
from megatron_rft.config.sections import Section
from megatron_rft.data.images import ALBUM, PromptImages
from megatron_rft.data.prompts import PromptSet
from megatron_rft.data.rendering import ask_again
from megatron_rft.data.stream import Stream
from megatron_rft.megatron import parallel
from megatron_rft.megatron.actor import Actor
from megatron_rft.objectives.base import Objective
from megatron_rft.objectives.plugins.distil import Distilled
from megatron_rft.objectives.plugins.dynamic import DynamicConstraint
from megatron_rft.objectives.plugins.pipo import PIPO
from megatron_rft.plan.model_shape import ModelShape
from megatron_rft.plan.routes import why_not_replayed
from megatron_rft.plan.vllm import choose_for
from megatron_rft.rollout.feedback import Feedback
from megatron_rft.rollout.routes import RouteStore
from megatron_rft.rollout.sampler import Sampler
from megatron_rft.training import build, dynamic_constraint, loop, user_algorithm
from megatron_rft.training.engines import EngineBuilder
from megatron_rft.training.online_batches import OnlineBatches
from megatron_rft.training.problems import Problems
from megatron_rft.training.run import TrainingRun
from megatron_rft.training.teacher import by_row, check_images
from megatron_rft.utils.errors import DataError

PLUGINS = {DynamicOptions: DynamicConstraint, section.Distil: Distilled, section.PIPO: PIPO}


def train(recipe: Recipe) -> int:
    """Train until run.steps or a signal. Returns the exit status."""
    engines, options, algorithm = EngineBuilder(recipe), recipe.rollout, recipe.algorithm
    engines.check_gpus()
    tokenizer, hf_config = build.load_model_files(recipe.model, recipe.run.seed, recipe.lora, recipe.teaching)
    if recipe.data.image_field:
        check_images(recipe.teaching, build.tokenizer_folder(recipe.model))
    problems = Problems(recipe.data, recipe.environment)
    prompts = problems.prompts("train", tokenizer)
    evaluated = problems.of_evaluations(tokenizer)  # wrong rows of these show now, too
    encode = partial(ask_again, tokenizer=tokenizer, form=problems.prompt_format("train"))
    feedback = build_feedback(algorithm, tokenizer, encode, prompts) if algorithm.uses_feedback else None
    stream = Stream(prompts.prompts, recipe.run.seed, recipe.data.shuffle)
    objective = build_objective(algorithm, recipe.setting, recipe.plugins)
    of_row = by_row(recipe.teaching, recipe.data.teacher_field, ((p.index, p.fields) for p in prompts.prompts))
    models = build.Networks(hf_config, recipe).online(objective, of_row)
    if recipe.data.image_field:
        models.see(PromptImages(prompts.prompts, Path(recipe.run.output_dir) / ALBUM))
    routes = replayed_routes(recipe.rollout, hf_config, models.actor)

    with ExitStack() as stack:
        about = {"dropped": prompts.dropped, "given": evaluated, "keeps_episodes": routes is None}
        run = TrainingRun(recipe, tokenizer, models, stream, recipe.run.steps, stack, **about)
        pairs = refiner = None
        if recipe.refines:
            template = recipe.constraint.template_text(recipe.reward.kind)
            refiner = dynamic_constraint.build_refiner(
                engines, models, tokenizer, encode, template, run.reward.maximum, recipe.run.seed, stack
            )
            pairs = partial(dynamic_constraint.shown_pairs, actor=models.actor, tokenizer=tokenizer)
        background = recipe.trains_while_sampling
        sampler = Sampler(
            run.player,
            build.build_sampling(options, tokenizer, routes=routes is not None),
            run.reward,
            tokenizer,
            options.group_size,
            recipe.run.seed,
            keep=objective.keep,
            max_rounds=algorithm.sampling_rounds,
            gather=parallel.gather,
            gather_on_main=parallel.gather_on_main,
            driver=run.player.driver(),
            contexts=feedback,
            refiner=refiner,
            phases=nullcontext if background else run.phases,  # phases belong to the trainer's thread
            background=background,
            routes=routes,
        )
        batches = OnlineBatches(run, sampler, run.weights, options.prompts_per_step, options.staleness, pairs)
        stack.enter_context(closing(batches))
        return loop.train(run, batches, models, objective)


def build_objective(algorithm: Online, setting: Setting, plugins: Sequence[Section] = ()) -> Objective:
    """The algorithm, wrapped in its plug-ins, the innermost first."""
    build_own = user_algorithm.build_objective if algorithm.of_user else objectives.build
    objective = build_own(algorithm, setting)
    for options in plugins:
        objective = PLUGINS[type(options)](objective, options, setting)
    return objective


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
