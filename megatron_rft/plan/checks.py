"""Checks a recipe across its sections for a number of ranks, and writes the plan as text.

It runs before torch is imported, so that a wrong recipe fails in a second, before a job is queued.
"""

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from megatron_rft.config import passthrough
from megatron_rft.config.algorithms.base import Algorithm, Lengths
from megatron_rft.config.constraint import Constraint
from megatron_rft.config.datasets import CODE, DATASETS, HUB, HUB_NAME, READ, suffix_of
from megatron_rft.config.environment import AnyEnvironment
from megatron_rft.config.gpu_defaults import plan_line
from megatron_rft.config.messages import many
from megatron_rft.config.recipe import Recipe
from megatron_rft.config.sections import Batching, Optimizer, Rollout, Run
from megatron_rft.config.trainers import Generation
from megatron_rft.plan import host, lora, memory, model_shape, routes, teacher
from megatron_rft.plan.engines import check_engines, check_speed, engine_processes
from megatron_rft.plan.layout import UNEVEN, Layout, check_layout
from megatron_rft.plan.model_shape import ModelShape
from megatron_rft.plan.vllm import check_vllm, choose, choose_for
from megatron_rft.utils import device, user_code
from megatron_rft.utils.errors import ConfigError, DataError, did_you_mean

NO_STORE = "where there are no trajectories yet: `megatron-rft generate` makes them"


@dataclass(frozen=True)
class Plan:
    layout: Layout
    lines: list[str]

    def __str__(self) -> str:
        return "\n".join(self.lines)


def check(
    recipe: Recipe,
    world_size: int = 1,
    ranks_per_node: int | None = None,
    gpu_gib: float | None = None,
    must_fit: bool = True,
    starts: bool = False,
) -> Plan:
    """Make all checks that need neither torch nor the data. Return the plan, or raise a UserError.
    `ranks_per_node`: None for a single node. `gpu_gib`: memory of a device, which the plan must fit if `must_fit`.
    `starts`: the recipe runs here and now, so its engine must be installed, and it must fit this machine's GPUs."""
    gpu_gib = device.gpu_gib() if starts else gpu_gib
    check_installed(recipe)
    shape, model_line = check_model(recipe)
    layout = check_layout(recipe.megatron, world_size, shape)
    data_lines = check_files(recipe)
    longest = check_lengths(recipe, shape)
    paths = recipe.teaching.teachers.values() if recipe.teaching else ()
    teachers = [teacher.check(path, shape, recipe.megatron, layout, longest) for path in paths]
    planned = None if starts else recipe.vllm
    engine = choose_for(recipe.rollout, shape, bool(gpu_gib), planned)
    on_gpu = bool(gpu_gib) or device.has_cuda_device()
    adapters = [lora.check(recipe.lora, shape)] if recipe.lora and shape else []
    if adapters and recipe.trainer == "rl":
        adapters.append(lora.sync_line(recipe.rollout.dtype or recipe.model.precision, shape))
    check_vllm(engine.name, recipe.vllm, recipe.rollout, recipe.longest_generation, shape, recipe.model.precision)
    routes.check_balancing(recipe.megatron, recipe.lora, shape)
    experts = routes.check(recipe.rollout, recipe.megatron, shape, engine.name) if recipe.trainer == "rl" else []
    check_speed(recipe, choose(recipe.rollout.engine, shape, bool(gpu_gib), planned).name if recipe.refines else None)
    if recipe.trainer == "generate":
        memory_line = "memory: not computed, each worker has its engine on a device of its own"
        store = _generation(recipe.generation, recipe.rollout, recipe.run)
        return Plan(layout, [model_line, *data_lines, *store, engine.line(recipe.vllm, recipe.rollout), memory_line])
    # optimizer steps of the run; None where `run.epochs` decides, once the data is read
    if recipe.trainer == "rl":
        batch_lines, steps_per_batch = _rl_batch(recipe)
        steps = of_policy = recipe.run.steps * steps_per_batch
        if recipe.critic:
            of_policy -= recipe.critic.warmup_steps * steps_per_batch
            check_schedule("critic", recipe.critic.lr_warmup_steps, recipe.optimizer, steps)
    else:
        batch_lines, of_policy = _given_batch(recipe), recipe.run.steps
    check_schedule("optimizer", recipe.optimizer.lr_warmup_steps, recipe.optimizer, of_policy)
    budget, shares = recipe.batching.micro_batch_tokens, recipe.trainer == "rl"
    whole, prompt = shape.whole_sequences if shape else "", recipe.data.max_prompt_tokens
    gpu_defaults = plan_line(recipe.megatron, recipe.optimizer.use_distributed_optimizer, bool(shape and shape.experts))
    score, kinds = getattr(recipe.environment, "score", None), {each.kind: 0 for each in recipe.reward.everything()}
    given = {"name": recipe.algorithm.name} | recipe.algorithm.model_dump(exclude_unset=True)  # also by a base
    lines = [
        model_line,
        *adapters,
        *teachers,
        *data_lines,
        f"layout: {layout} = {many(world_size, 'rank')}",
        engine.line(recipe.vllm, recipe.rollout),
        *experts,
        *batch_lines,
        *check_engines(recipe, world_size, ranks_per_node),
        f"micro-batches: up to {budget} tokens; the longest sequence is {longest}",
        *([_shared_prompts_line(recipe.batching, recipe.rollout, prompt, layout, whole)] * shares),
        *([gpu_defaults] if on_gpu else []),
        "algorithm: " + ", ".join(f"{option} {value}" for option, value in given.items()),
        _schedule_line(recipe.optimizer, recipe.run, of_policy),
        f"reward: {f'environment.score, {score}' if score else ' + '.join(kinds)}",
        *([environment_line(recipe.environment, recipe.rollout, prompt, budget)] if recipe.environment else []),
        *_memory_lines(recipe, shape, layout, gpu_gib, ranks_per_node or world_size, must_fit),
    ]
    return Plan(layout, lines)


def _shared_prompts_line(batching: Batching, rollout: Rollout, prompt: int, layout: Layout, model: str) -> str:
    if why := batching.why_not_shared(layout.cp, model):
        return f"shared prompts: off, {why}; each response computes its prompt"
    group, response = rollout.group_size, rollout.max_response_tokens
    together, apart = prompt + group * response, group * (prompt + response)
    most = f"{prompt} + {group} x {response} = {together}"
    line = f"shared prompts: on; a group has up to {most} tokens instead of {apart}"
    if together > batching.micro_batch_tokens:
        line += ", and is cut where they do not fit a micro-batch; each part computes the prompt"
    return line


def _memory_lines(
    recipe: Recipe, shape: ModelShape | None, layout: Layout, gpu_gib: float | None, ranks: int, must_fit: bool
) -> list[str]:
    """`ranks`: on this node."""
    if shape is None:
        return [f"memory: unknown before the model's config.json is here: hf download {recipe.model.path} config.json"]
    if UNEVEN & set(recipe.megatron.extra):
        return ["memory: not computed for pipeline stages of unequal size"]
    plan = memory.MemoryPlan(recipe, shape, layout, gpu_gib and gpu_gib * memory.GIB)
    lines = ([shape.tower.line(recipe.data, recipe.vision)] if shape.tower else []) + memory.lines(plan)
    if not gpu_gib and device.torch_is_cpu_build():
        apart = recipe.rollout.placement != "colocated" and not recipe.rollout.servers
        engines = engine_processes(recipe.rollout, recipe.vllm, layout.world) if apart else 0
        lines += host.lines(plan, ranks, engines)
    return lines + ([memory.check_fits(plan)] if gpu_gib and must_fit else [])


def check_installed(recipe: Recipe) -> None:
    """Checks that the packages which the recipe needs are installed."""
    passthrough.megatron_core()
    if find_spec("psutil") is None:
        raise ConfigError("psutil is not installed, without which megatron-core's checkpoints hang: pip install psutil")
    device.check_torch_build()
    with_te = device.has_transformer_engine()
    if recipe.model.precision == "fp8" and not with_te:
        raise ConfigError(
            "model.precision: fp8 needs Transformer Engine, which is not installed here; it runs on NVIDIA GPUs from "
            f"compute capability 8.9 on. Use bf16, or install it on such a machine: {device.TRANSFORMER_ENGINE_INSTALL}"
        )
    if recipe.megatron.attention_backend != "auto" and not with_te:
        raise ConfigError(
            f"megatron.attention_backend: {recipe.megatron.attention_backend} chooses a kernel of Transformer Engine, "
            "which is not installed here: torch's own attention is used. Set it to auto"
        )
    if recipe.tracking.wandb and find_spec("wandb") is None:
        install = "pip install 'megatron-rft[wandb]', or set it to null"
        raise ConfigError(f"tracking.wandb: wandb is not installed: {install}")


def check_writable(path: str | Path, option: str = "run.output_dir") -> None:
    """Checks that the folder is writable or can be created. Writes nothing."""
    folder = place = Path(path).expanduser().absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        why = "cannot be written here" if place.is_dir() else "is not a folder"
        raise ConfigError(f"{option}: {folder} cannot be made: {place} {why}. Choose another {option}")


def make_folder(path: str | Path, option: str = "run.output_dir") -> None:
    """Creates the folder first of all, because some file systems refuse writes only at this point."""
    try:
        Path(path).expanduser().mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{option}: {path} cannot be made: {error.strerror}. Choose another") from None


def check_model(recipe: Recipe) -> tuple[ModelShape | None, str]:
    """Return the model's shape (None before its download) and a line that says what the run loads."""
    model = recipe.model
    shape = model_shape.find_shape(model.path, loads=model.initialise == "pretrained")
    for judge in recipe.reward.judges():
        model_shape.find_model(judge, "reward.model")
    if model.tokenizer:
        model_shape.find_model(model.tokenizer, "model.tokenizer")
    for option, path in (("model.reference", model.reference), ("critic.path", recipe.critic and recipe.critic.path)):
        other = model_shape.find_shape(path, option) if path else None
        if shape and other and (other.vocabulary != shape.vocabulary):
            raise DataError(f"{option}: its vocabulary has {other.vocabulary} tokens, model.path's {shape.vocabulary}")
    weights = "random weights" if model.initialise == "random" else "its weights"
    if shape and not shape.tower and model.vision == "trained":
        raise DataError(f"model.vision: {model.path} has no vision tower to train: leave it out")
    if shape and shape.tower and (not recipe.batching.pack_sequences or model.precision == "fp8"):
        raise ConfigError("model.path: a model that reads images needs batching.pack_sequences true, and no fp8")
    source = f"{model.path} ({shape})" if shape else f"{model.path}, from the Hugging Face hub: not checked yet"
    return shape, f"model: {source}, {weights}, {model.precision}"


def check_files(recipe: Recipe) -> list[str]:
    """Return one line for each data set that the run reads. Local files must exist; the hub is not contacted."""
    parts = {f"data.{name}": getattr(recipe.data, name) for name in ("train", "validation", "test")}
    benchmarks = {f"evaluation.benchmarks.{name}": source for name, source in recipe.evaluation.benchmarks.items()}
    lines = []
    for name, source in (parts | benchmarks).items():
        if source is None:
            continue
        if recipe.trainer == "offline" and name == "data.train":
            lines.append(_check_store(source.path))
            continue
        if not source.on_hub:
            _check_path(name, source.path)
        known = DATASETS.get(source.adapter)
        if known and name in parts and recipe.trainer in ("rl", "generate"):
            needed, kind = known.reward, recipe.reward.kind
            # Any other verifier of a program or a tool call would give every response 0.
            if kind != needed and {"code", "tool"} & {needed, kind} and kind in ("math", "code", "tool", "choice"):
                raise ConfigError(f"{name}: {source.adapter} is graded by reward.kind={needed}, not {kind}")
        adapter = f" ({source.adapter})" if source.adapter else ""
        where = ", from the Hugging Face hub: not checked yet" if source.on_hub else ""
        lines.append(f"{name}: {source.path.removeprefix(HUB)}{adapter}{where}")
    return lines


def _check_store(path: str) -> str:
    """Checks that a trajectory store is complete or absent; a partial one is refused."""
    folder = Path(path)
    if (folder / "index.json").is_file():
        return f"data.train: the trajectories in {path}"
    if folder.exists():
        raise DataError(
            f"data.train: {path} is not a complete trajectory store: it has no index.json. `megatron-rft generate` "
            "continues an incomplete one"
        )
    return f"data.train: {path}, {NO_STORE}"


def check_store_is_there(recipe: Recipe) -> None:
    """Checks that the store exists when an offline run starts; a plan may precede the generation of its store."""
    if recipe.trainer == "offline" and not (Path(recipe.data.train.path) / "index.json").is_file():
        raise DataError(f"data.train: {recipe.data.train.path}, {NO_STORE}")


def _check_path(option: str, path: str) -> None:
    code = CODE.fullmatch(path)
    place = (code and user_code.source(path)) or Path(path)
    if place.is_dir():
        if not any(suffix_of(file.name) for file in place.rglob("*")):
            raise DataError(f"{option}: the folder {path} has no {READ} file")
    elif not place.exists():
        if path.startswith(user_code.SESSION):
            user_code.load(path, option)  # says what to do
        near = [*DATASETS, *(str(file) for file in place.parent.glob("*"))]
        hub = f" On the Hugging Face hub? Write {HUB}{path}" if HUB_NAME.fullmatch(HUB + path) else ""
        raise DataError(f"{option}: there is no such file or folder, {path}.{did_you_mean(path, near) or hub}")
    elif not code and suffix_of(path) is None:
        raise DataError(f"{option}: {path} is not a {READ} file")


def check_lengths(recipe: Recipe, shape: ModelShape | None) -> int:
    """Checks that the longest sequence fits a micro-batch and the model's positions; returns its tokens."""
    rollout, prompt, budget = recipe.rollout, recipe.data.max_prompt_tokens, recipe.batching.micro_batch_tokens
    if recipe.trainer == "rl":
        longest = prompt + rollout.max_response_tokens
        if longest > budget:
            raise ConfigError(
                f"batching.micro_batch_tokens: a sequence may have {longest} tokens (data.max_prompt_tokens {prompt} + "
                f"rollout.max_response_tokens {rollout.max_response_tokens}), and does not fit {budget}"
            )
        budget, positions = recipe.batching.tokens_without_backward, shape.max_positions if shape else None
        recipe.algorithm.check_lengths(Lengths(rollout.max_response_tokens, longest, budget, positions))
    elif recipe.trainer == "generate":
        longest = 0
    else:
        longest = budget
        if prompt >= budget:
            raise ConfigError(f"data.max_prompt_tokens: {prompt} leaves none of batching.micro_batch_tokens, {budget}")
    if recipe.batching.tokens_without_backward < longest:
        raise ConfigError(
            f"batching.forward_only_tokens: {recipe.batching.forward_only_tokens} does not hold a sequence of {longest}"
        )
    needed = recipe.longest_generation
    if shape and needed > shape.max_positions:
        raise ConfigError(
            f"data.max_prompt_tokens {prompt} + response {needed - prompt} = {needed} tokens is beyond the model's "
            f"max_position_embeddings, {shape.max_positions}"
        )
    return longest if not shape else min(longest, shape.max_positions)


def _rl_batch(recipe: Recipe) -> tuple[list[str], int]:
    """Return the plan's lines, and the optimizer steps of a sampled batch."""
    rollout, algorithm = recipe.rollout, recipe.algorithm
    prompts, group = rollout.prompts_per_step, rollout.group_size
    mini = algorithm.mini_batch_prompts or prompts
    if group < 2 and algorithm.compares_responses:
        why = f"{algorithm.name} compares the responses of a group"
        raise ConfigError(f"rollout.group_size: {why}: it takes 2 or more, not {group}")
    if prompts % mini:
        divisors = [n for n in range(1, prompts + 1) if prompts % n == 0]
        raise ConfigError(
            f"algorithm.mini_batch_prompts: {mini} does not divide rollout.prompts_per_step, {prompts}. "
            f"Possible: {', '.join(map(str, divisors))}"
        )
    parts, epochs = prompts // mini, algorithm.epochs
    over = f" x {epochs} epochs" if epochs > 1 else ""
    lines = [
        f"global batch: {prompts * group} responses = {prompts} prompts x {group}",
        f"updates: {many(parts * epochs, 'optimizer step')} = {parts} x {mini} prompts{over}",
    ]
    if algorithm.sampling_rounds > 1:
        lines.append(f"sampling: groups that agree are replaced, in up to {many(algorithm.sampling_rounds, 'round')}")
    if recipe.critic:
        alone = f", alone for {many(recipe.critic.warmup_steps, 'step')}" if recipe.critic.warmup_steps else ""
        lines.append(f"critic: as many steps at {recipe.critic.lr:g}{alone}")
    if recipe.pipo:
        pipo = recipe.pipo
        first = pipo.window + 1 + (recipe.critic.warmup_steps if recipe.critic else 0)
        late = ": never in this run" if recipe.run.steps < first else ""
        when = ", most of it during generation" if recipe.trains_while_sampling and not recipe.rollout.staleness else ""
        lines.append(f"pipo: one verification step more, from step {first} on{late}, at {pipo.learning_rate:g}{when}")
    if recipe.constraint and recipe.constraint.kind != "none":
        lines.append(_constraint_line(recipe.constraint, algorithm))
    return lines, parts * epochs


def _constraint_line(constraint: Constraint, algorithm: Algorithm) -> str:
    if not constraint.refines:
        return f"constraint: the KL to the reference in the {algorithm.kl_in}, coefficient {constraint.eta:g}"
    which = "all responses" if constraint.share == 1 else f"{constraint.share:.0%} of the responses"
    which += f", up to {constraint.first} of a group" if constraint.first else ""
    what = f"in the {constraint.mode or 'loss'}, eta {constraint.eta:g}" if constraint.eta else "measured only, eta 0"
    return f"constraint: a frozen refiner corrects {which} that can score higher; {what}"


def _given_batch(recipe: Recipe) -> list[str]:
    algorithm = recipe.algorithm
    pairs = f" = {algorithm.batch_sequences // 2} pairs" if algorithm.pairs else ""
    lines = [f"global batch: {algorithm.batch_sequences} sequences{pairs}, one optimizer step"]
    if recipe.trainer == "offline":
        every, patience = recipe.evaluation.every, recipe.evaluation.patience
        stop = f", until {patience} in a row find nothing better" if patience else ""
        lines.append(f"validation: the held-out problems, every {every} steps{stop}" if every else "validation: none")
    return lines


def environment_line(environment: AnyEnvironment, rollout: Rollout, prompt: int, budget: int) -> str:
    each = f" of up to {environment.turn_tokens} tokens" if environment.turn_tokens else ""
    several, most = environment.segments > 1, environment.segments * (prompt + rollout.max_response_tokens)
    line = f"environment: {environment.name}, up to {many(environment.max_turns, 'turn')}{each}; "
    line += "a segment" if several else "a response"
    line += f" has up to {rollout.max_response_tokens} tokens with the environment's"
    if several:
        line += f", an episode up to {environment.segments} segments, {most} tokens with their prompts"
    if several and most > budget:
        line += f"; an episode beyond {budget} (batching.micro_batch_tokens) takes more memory than is counted here"
    return line


def _generation(generation: Generation, rollout: Rollout, run: Run) -> list[str]:
    return [
        f"sampling: {many(rollout.group_size, 'response')} of up to {rollout.max_response_tokens} tokens to each "
        f"problem, temperature {rollout.temperature:g}, seed {run.seed}",
        f"store: {run.output_dir}, {many(generation.problems_per_shard, 'problem')} a shard, "
        f"{generation.held_out:.0%} held out",
    ]


def check_schedule(section: str, warmup: int, optimizer: Optimizer, total: int | None) -> None:
    """`total`: the optimizer steps of the section's model; None if the run's length is in epochs."""
    end = optimizer.lr_decay_steps or total
    if end is not None and warmup > end:
        name = "lr_decay_steps" if optimizer.lr_decay_steps else "the run's optimizer steps"
        raise ConfigError(f"{section}.lr_warmup_steps: {warmup} is beyond {name}, {end}")


def _schedule_line(optimizer: Optimizer, run: Run, total: int | None) -> str:
    steps = many(run.steps, "step")
    length = f"{run.epochs:g} epochs" if total is None else f"{many(total, 'optimizer step')} in {steps}"
    warmup = f", {optimizer.lr_warmup_steps} of warmup" if optimizer.lr_warmup_steps else ""
    return f"schedule: {length}{warmup}, learning rate {optimizer.lr:g} {optimizer.lr_decay_style}"
