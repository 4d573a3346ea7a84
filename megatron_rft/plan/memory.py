"""Computes the bytes of memory that a run needs on one rank, and options that reduce them. No torch.

Weights, gradients and optimizer are exact: tests build the model and count. Activations (activations.py) and engines
are estimates. vLLM takes a share of the device at its start, for weights and cache together, and keeps it; the plan
counts it if it knows the device's size. Of engines outside the ranks the plan counts the buckets of their weights and
the CUDA context of a process. It does not count CUDA's and NCCL's own memory (about a GiB), gaps between blocks of the
allocator, and other memory of an engine on a rank's device.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from megatron_rft.config.lora import Lora
from megatron_rft.config.recipe import Recipe
from megatron_rft.config.sections import Batching, Model, Rollout
from megatron_rft.config.vllm import Vllm
from megatron_rft.plan.activations import activations
from megatron_rft.plan.devices import GIB
from megatron_rft.plan.engines import engine_processes, gpu_share
from megatron_rft.plan.layout import Layout, problems
from megatron_rft.plan.lora import adapter_chunks
from megatron_rft.plan.model_shape import ModelShape
from megatron_rft.plan.parameters import Parameter, buckets, in_layers, owned, stage_chunks, total
from megatron_rft.plan.shared_prompts import SharedGroup
from megatron_rft.plan.teacher import weights as teacher_weights
from megatron_rft.plan.vllm import choose, room_for_cache
from megatron_rft.utils.errors import ConfigError

BYTES = {"fp32": 4, "bf16": 2, "fp8": 2}
SYNC_BUCKETS = 2 * (64 << 20)  # of an engine outside of the ranks (inference/transport/buckets.py)
CUDA_CONTEXT = GIB // 2  # approximate, of another process on the rank's device
MOMENTS, MAIN = 8, 4  # per parameter: Adam's two in fp32; the fp32 copy of a bf16 parameter


@dataclass(frozen=True)
class State:
    """Bytes of persistent training state on a rank."""

    weights: int
    gradients: int
    optimizer: int

    def __add__(self, other: "State") -> "State":
        return State(self.weights + other.weights, self.gradients + other.gradients, self.optimizer + other.optimizer)

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


def state_of(recipe: Recipe, s: ModelShape, layout: Layout, stage: int, value_head: bool = False) -> State:
    """Return the state of a rank of the pipeline stage; with the distributed optimizer, of the rank that has most."""
    element, extra = BYTES[recipe.model.precision], recipe.megatron.extra
    frozen = 0
    if not (recipe.lora and value_head and recipe.critic.path is None):  # such a critic has the policy's
        tower = s.tower.whole if s.tower and stage == 0 and recipe.model.vision == "frozen" else 0
        frozen = (tower + (total(stage_chunks(s, layout, stage, value_head)) if recipe.lora else 0)) * element
        frozen -= s.hidden * element * bool(recipe.lora and value_head and stage == layout.pp - 1)
    own_moments = recipe.pipo is not None and recipe.pipo.optimizer_state == "own" and not value_head
    given = recipe.optimizer.extra
    moments, main = numbers(given, "exp_avg", "exp_avg_sq"), numbers(given, "main_params")
    stays = 1 - min(given.get("optimizer_offload_fraction", 0), 1)  # with optimizer_cpu_offload the rest is on the host
    per_parameter = stays * (moments * (2 if own_moments else 1) + (main if element == 2 else 0))
    gradient = 4 if extra.get("grad_reduce_in_fp32", True) else element
    state = State(frozen, 0, 0)
    for count, ranks, buffer, _ in buffers(recipe.lora, recipe.model, extra, s, layout, stage, value_head):
        if recipe.optimizer.use_distributed_optimizer:
            length = sum(length for length, _ in buffer)
            state += State(length * element, length * gradient, round(owned(buffer, ranks) * per_parameter))
        else:
            state += State(count * element, count * gradient, round(count * per_parameter))
    return state


def numbers(optimizer: dict[str, Any], *names: str) -> int:
    """Return the bytes of these numbers of a parameter: fp32 unless the options of `optimizer` say otherwise."""
    stored = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}
    return sum(stored[optimizer.get(f"{name}_dtype", "float32")] for name in names)


def buffers(
    lora: Lora | None, model: Model, extra: dict[str, Any], s: ModelShape, layout: Layout, stage: int, value_head: bool
) -> Iterator[tuple[int, int, list, int]]:
    """Yield (parameters, ranks that share them, buckets, parameters of the largest tensor) of each buffer of gradients
    on a rank of the pipeline stage.

    `extra`: further options of the section `megatron`. The default on GPUs overlaps, and its buckets add a few
    kilobytes of padding, which are not counted.
    """
    data_parallel = layout.world // (layout.tp * layout.pp)  # context parallel ranks share it too
    experts_parallel = layout.world // (layout.ep * layout.etp * layout.pp)
    size = extra.get("bucket_size") or max(40_000_000, 1_000_000 * data_parallel)
    trained = stage_chunks(s, layout, stage, value_head)
    if lora:
        trained = adapter_chunks(s, lora, layout, stage, value_head)
    if s.tower and stage == 0 and model.vision == "trained":
        trained[0] += map(Parameter, s.tower.parameters)
    for number, chunk in enumerate(trained):
        whole = not extra.get("overlap_grad_reduce") or stage > 0 or number > 0
        for expert, ranks in ((False, data_parallel), (True, experts_parallel)):
            parameters = [each for each in chunk if each.expert == expert]
            if parameters:
                bucketed = buckets(parameters, ranks, math.inf if whole else size)
                largest = max(each.count // each.tensors for each in parameters)
                yield sum(each.count for each in parameters), ranks, bucketed, largest


@dataclass(frozen=True)
class OwnEngines:
    """The engines that each rank has on its own device. `device`: the bytes of a GPU, if known."""

    recipe: Recipe
    s: ModelShape
    device: float | None = None

    @property
    def lengths(self) -> list[int]:
        """The longest sequence of each engine of a rank."""
        recipe = self.recipe
        generates = recipe.trainer == "rl" or recipe.validates or recipe.data.test
        own = [recipe.longest_generation] if generates and recipe.rollout.placement == "colocated" else []
        return own + ([recipe.longest_refinement] if recipe.refines else [])

    @property
    def by_vllm(self) -> bool:
        recipe = self.recipe
        if not self.lengths:  # the engine is on servers, which may have kernels that this machine has not
            return False
        return choose(recipe.rollout.engine, self.s, bool(self.device), recipe.vllm).name == "vllm"

    @property
    def share(self) -> float:
        """The share of a device's memory for each vLLM."""
        return self.recipe.vllm.arguments().get("gpu_memory_utilization") or gpu_share(self.recipe)

    @property
    def element(self) -> int:
        """The bytes of a number."""
        return BYTES[self.recipe.rollout.dtype or self.recipe.model.precision]

    @property
    def weights(self) -> int:
        """The bytes of an engine's weights. FP8 rounds only the layers' matrices, and none of a mixture of experts."""
        s, element = self.s, self.element
        rounded = s.multiplied - s.vocabulary * s.hidden if self.recipe.vllm.quantization else 0
        return s.whole() * element - rounded * (element - 1)

    @property
    def workers(self) -> int:
        """The devices that share an engine."""
        return 1 if self.recipe.refines else self.recipe.vllm.tensor_parallel_size

    @property
    def token(self) -> int:
        """The bytes of a token's keys and values."""
        return 2 * self.s.kv * len(self.s.mixture) * self.element

    def memory(self, layout: Layout) -> tuple[int, int]:
        """Return (bytes of each engine of a rank with its weights, bytes of the largest additional cache)."""
        rollout, lengths = self.recipe.rollout, self.lengths
        if not lengths:
            return 0, 0
        if self.by_vllm:
            tower = self.s.tower.whole * self.element if self.s.tower else 0  # each worker's
            whole = tower + (self.weights - tower) // self.workers
            if given := self.recipe.vllm.arguments().get("kv_cache_memory_bytes"):
                return whole + given, 0
            return max(whole, round(self.share * (self.device or 0))), 0
        mine = -(-rollout.prompts_per_step * rollout.group_size // layout.world)
        rows = min(rollout.max_batch_sequences, mine)
        both = self.recipe.refines and self.recipe.constraint.overlap
        return self.weights, rows * self.token * (sum(lengths) if both else max(lengths))


def links(rollout: Rollout, vllm: Vllm, layout: Layout, device: float | None) -> int:
    """Return the bytes on a rank's device for its engines outside of the ranks: the buckets of their weights and, for
    each process, a CUDA context (if `device` gives a GPU)."""
    if rollout.placement == "colocated":
        return 0
    engines = -(-engine_processes(rollout, vllm, layout.world) // layout.world)
    context = CUDA_CONTEXT if device and rollout.placement == "process" else 0
    return engines * (SYNC_BUCKETS + context)


def update_memory(
    recipe: Recipe, batching: Batching, keys: float | None, s: ModelShape, layout: Layout, stage: int
) -> tuple[State, int]:
    """Return the training state of a rank of the stage, with the critic's, and the activations of an update. `keys`:
    of shared prompts (shared_prompts.Group)."""
    state = state_of(recipe, s, layout, stage)
    if recipe.critic:
        state += state_of(recipe, s, layout, stage, value_head=True)
    second = recipe.algorithm.compares_distributions or recipe.distil is not None
    element, tower = BYTES[recipe.model.precision], 0.0
    if recipe.data.image_field and s.tower and stage == 0:
        prompt, longest = recipe.data.max_prompt_tokens, recipe.longest_generation
        shown = max(1, batching.micro_batch_tokens // longest) * math.prod(s.tower.grid(recipe.data, prompt))
        tower = element * s.tower.activations(shown, recipe.vision)
    return state, round(tower) + activations(element, recipe.megatron, batching, second, keys, s, layout, stage)


def saved(recipe: Recipe, s: ModelShape, layout: Layout, stage: int) -> int:
    """Return the additional host memory of a rank while it makes a checkpoint: copies for the writer of its part of
    fp32 weights and moments, for each set of moments, and of its share of the weights, whole tensors."""
    if not recipe.optimizer.use_distributed_optimizer:
        return 0
    copies, own = 0, recipe.pipo is not None and recipe.pipo.optimizer_state == "own"
    sections = recipe.lora, recipe.model, recipe.megatron.extra
    for value_head in (False, True) if recipe.critic else (False,):
        for count, ranks, _, tensor in buffers(*sections, s, layout, stage, value_head):
            copies += BYTES[recipe.model.precision] * max(count // ranks, tensor)
            copies += (MOMENTS + MAIN) * count * (1 + (own and not value_head)) // ranks
    return copies


def gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB / 100 else f"{size / 2**20:.2f} MiB"


class MemoryPlan:
    """Bytes on the rank of the fullest pipeline stage. `device`: the bytes of a GPU, if known."""

    def __init__(self, recipe: Recipe, s: ModelShape, layout: Layout, device: float | None = None):
        self.recipe, self.s, self.layout, self.device = recipe, s, layout, device
        self.stage, self.state, self.activations = self._fullest_stage()
        self.engines = OwnEngines(recipe, s, device)
        each, self.cache = self.engines.memory(layout)  # the cache: of the hf engine that has the most
        # A copy of the whole model for each engine or, for vLLM on a device of known size, its share. The refiner's
        # never sleeps, the policy's sleeps during training.
        self.awake = each * recipe.refines
        self.engine = each * len(self.engines.lengths) - self.awake
        self.links = links(recipe.rollout, recipe.vllm, layout, device)  # buffers for engines outside the rank
        # Transformer Engine keeps each matrix in FP8, as it is and transposed. In training FP8 activations save as much
        # (docs/gpu_results.md).
        networks = (1 + bool(recipe.critic)) * (recipe.model.precision == "fp8")
        self.copies = 2 * in_layers(s, layout, self.stage) * networks
        self.reserve = round(recipe.rollout.reserve_gib * GIB) if device and self.engines.by_vllm else 0
        self.offloads = recipe.rollout.offload_trainer
        teachers = recipe.teaching.teachers.values() if recipe.teaching else ()
        distilled = [teacher_weights(path, layout, BYTES[recipe.model.precision]) for path in teachers]
        references, other = self._references()
        self.other = max(other, *distilled, 0)  # on the device while another model computes, before the update
        # weights in host memory, and the optimizer's state if it waits there while engines generate
        self.host = sum(distilled) + references + self.state.optimizer * self.offloads
        self.checkpoint = saved(recipe, s, layout, self.stage)

    def _fullest_stage(self) -> tuple[int, State, int]:
        """Return (number, state, activations)."""
        recipe, s, layout = self.recipe, self.s, self.layout
        group, batching = SharedGroup.of(recipe, s, layout), recipe.batching
        if recipe.trainer == "rl":
            each = recipe.rollout.prompts_per_step * recipe.rollout.group_size * (1 + recipe.refines)
            batching = group.fill(batching, math.ceil(each / layout.dp))
        per_stage = [update_memory(recipe, batching, group.keys, s, layout, stage) for stage in range(layout.pp)]
        stage = max(range(layout.pp), key=lambda i: (per_stage[i][0].total + per_stage[i][1], i))
        return stage, *per_stage[stage]

    def _references(self) -> tuple[int, int]:
        """Return the bytes of the weights of a reference and of a moving average of the policy, and of the larger one
        on the device."""
        recipe, element = self.recipe, BYTES[self.recipe.model.precision]
        weights = trained = state_of(recipe, self.s, self.layout, self.stage).weights  # without the critic's
        if recipe.lora:
            trained = total(adapter_chunks(self.s, recipe.lora, self.layout, self.stage)) * element
        measured = recipe.refines or bool(recipe.constraint and recipe.constraint.kl_every)
        reference = (weights if recipe.model.reference else trained) * (recipe.algorithm.uses_reference or measured)
        average = trained * (recipe.algorithm.teacher_average is not None)
        return reference + average * 4 // element, max(reference, average)

    @property
    def phases(self) -> dict[str, int]:
        always = self.state.total + self.awake + self.links
        at_once = self.recipe.trains_while_sampling  # works while responses are generated and refined
        found = {"training": always + max(self.activations, self.other) + self.cache * at_once}
        if self.generates:
            beside = -self.state.gradients - self.state.optimizer if self.offloads else self.copies
            found["generation"] = always + beside + self.engine + self.cache + self.reserve
        return found

    @property
    def generates(self) -> bool:
        return bool(self.engine or self.awake)

    @property
    def largest(self) -> int:
        return max(self.phases.values())


def lines(m: MemoryPlan) -> list[str]:
    recipe, layout, engines = m.recipe, m.layout, m.engines
    where = f", of stage {m.stage + 1} of {layout.pp}" if layout.pp > 1 else ""
    critic = " (policy and critic)" if recipe.critic else ""
    parts = {
        f"weights{critic}": m.state.weights,
        "gradients": m.state.gradients,
        "optimizer": m.state.optimizer,
        "activations, about": m.activations,
        "engine": m.engine,
        "refiner's engine": m.awake,
        "cache, up to": m.cache,
        "links to engines outside": m.links,
        "FP8 copies of weights": m.copies,
        "free when vLLM wakes": m.reserve,
    }
    report = [f"memory of a rank{where}: " + ", ".join(f"{name} {gib(size)}" for name, size in parts.items() if size)]
    report.append("memory by phase: " + ", ".join(f"{name} {gib(size)}" for name, size in m.phases.items()))
    if engines.by_vllm and not m.device:
        report.append("memory of vLLM's cache: not counted; it depends on the memory of a GPU, which is not given")
    if recipe.trainer == "rl" and (models := recipe.reward.judges()):
        report.append(f"memory of the reward's {', '.join(models)}, once on every rank's device: not counted")
    if recipe.rollout.placement != "colocated":
        report.append(
            f"memory of engines outside of the ranks, {gib(engines.weights)} of weights each and a cache: not counted, "
            "also where they share a rank's GPU"
        )
    if m.checkpoint:
        report.append(f"memory of the host for a checkpoint: {gib(m.checkpoint)} on each rank")
    if m.host:
        what = "weights and optimizer state" if m.offloads else "weights"
        report.append(f"memory of the host, for each rank: {gib(m.host)} of {what} that wait for their turn")
    return report


def check_fits(m: MemoryPlan, phases: tuple[str, ...] = ("training", "generation")) -> str:
    """Return a line about the free memory in the fullest of the `phases` of a known device.

    Raises:
        ConfigError: it does not fit; the message says by how much, and which options would help.
    """
    device, engines = m.device, m.engines
    assert device is not None
    found = {phase: size for phase, size in m.phases.items() if phase in phases}
    phase, needed = max(found.items(), key=lambda each: each[1], default=("generation", 0))
    if needed <= device:
        if engines.by_vllm and not m.recipe.vllm.arguments().get("kv_cache_memory_bytes"):
            longest = max(m.recipe.vllm.max_model_len or 0, *engines.lengths)
            sequence = engines.token * longest / min(engines.workers, m.s.kv_heads)  # more workers have copies
            room_for_cache(engines.share, device, engines.weights / engines.workers, sequence)  # refuses a small share
        left = gib(round(device) - needed)
        return f"fits {device / GIB:g} GiB: {left} are left in the fullest phase, {phase}"
    named = [
        f"\n  {name}: {gib(size)}" + (", which fits" if size <= device else "")
        for name, size in sorted(knobs(m), key=lambda each: each[1])
        if size < needed
    ]
    raise ConfigError(
        f"{phase} needs {gib(needed)} on a rank, and there are {device / GIB:g} GiB. What would help, each by itself:"
        + ("".join(named) or " nothing that is known here; more ranks, or a smaller model")
        + "".join(f"\n{line}" for line in lines(m))
    )


def knobs(m: MemoryPlan) -> Iterator[tuple[str, int]]:
    """Yield (option to set, resulting peak bytes) for options that the model and the number of ranks allow."""
    recipe, layout, s, engines = m.recipe, m.layout, m.s, m.engines
    batching, rollout = recipe.batching, recipe.rollout

    def largest(layout: Layout = layout, **sections: dict[str, Any]) -> int:
        changed = {name: getattr(recipe, name).model_copy(update=values) for name, values in sections.items()}
        return MemoryPlan(recipe.model_copy(update=changed), s, layout, m.device).largest

    cut = replace(layout, tp=layout.tp * 2, etp=layout.etp * 2)
    if not list(problems(cut, s)):
        options = f"megatron.tensor_model_parallel_size={cut.tp} megatron.sequence_parallel=true"
        yield options, largest(cut, megatron={"sequence_parallel": True})
    for option, size in {"pipeline_model": "pp", "expert_model": "ep", "context": "cp"}.items():
        cut = replace(layout, **{size: 2 * getattr(layout, size)})
        if not list(problems(cut, s)):
            yield f"megatron.{option}_parallel_size={getattr(cut, size)}", largest(cut)
    if not recipe.optimizer.use_distributed_optimizer:
        yield "optimizer.use_distributed_optimizer=true", largest(optimizer={"use_distributed_optimizer": True})
    if recipe.optimizer.use_distributed_optimizer:
        yield f"twice as many ranks ({2 * layout.world})", largest(replace(layout, world=2 * layout.world))
    if engines.lengths and recipe.rollout.placement == "colocated" and not recipe.rollout.offload_trainer:
        yield "rollout.offload_trainer=true", largest(rollout={"offload_trainer": True})
    if engines.by_vllm:
        half = engines.share / 2
        yield f"vllm.gpu_memory_utilization={half:g}", largest(vllm={"gpu_memory_utilization": half})
    if recipe.megatron.recompute_granularity != "full":
        full = "megatron.recompute_granularity=full megatron.recompute_method=uniform megatron.recompute_num_layers=1"
        yield full, largest(megatron={"recompute_granularity": "full"})
    if recipe.model.precision == "fp32":
        yield "model.precision=bf16", largest(model={"precision": "bf16"})
    tokens, longest = batching.micro_batch_tokens // 2, recipe.data.max_prompt_tokens + rollout.max_response_tokens
    if recipe.trainer != "rl" or tokens >= longest:
        yield f"batching.micro_batch_tokens={tokens}", largest(batching={"micro_batch_tokens": tokens})
    if recipe.trainer == "rl" and rollout.max_batch_sequences > 1:
        half = min(rollout.max_batch_sequences, -(-rollout.prompts_per_step * rollout.group_size // layout.world)) // 2
        yield f"rollout.max_batch_sequences={max(half, 1)}", largest(rollout={"max_batch_sequences": max(half, 1)})
