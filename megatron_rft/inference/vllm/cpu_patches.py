"""Settings for vLLM's CPU build, and workarounds for four bugs of version 0.32.

Most of the bugs are silent: vLLM generates with wrong numbers. tests/parity/test_vllm.py finds those of the tied output
matrix and of experts; tests/unit/inference/vllm/test_engine.py finds that of the temperatures.
"""

import gc
import inspect
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from megatron_rft.config.vllm import SUPPORTED, installed
from megatron_rft.inference.vllm.arguments import RUNNER
from megatron_rft.utils import products
from megatron_rft.utils.errors import ConfigError

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # run the engine in this process
    "VLLM_NO_USAGE_STATS": "1",
    **RUNNER,
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer's threads run in this process too
}

_live = 0  # number of engines in this process
_created_world = False  # vLLM initialised torch.distributed, because no trainer had


def prepare() -> None:
    """Set the environment before vLLM is imported. Variables that are set already keep their values."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not torch.cuda.is_available():
        torch._dynamo.config.disable = True  # else the first computation of log-probs compiles C++ for 10 s
        # It would bind the trainer's memory too, and warn of it.
        torch.ops._C.init_cpu_memory_env = lambda nodes: None


@contextmanager
def preserved_process_state() -> Iterator[None]:
    """Restore the trainer's state after vLLM's start, which seeds the random generators, replaces
    torch.set_num_threads, and on a GPU leaves torch one thread. Nor does it freeze or thaw objects: what is frozen is
    not collected at its end, and at what is thawed, such as all modules, each collection looks for half a second."""
    states, set_num_threads = (random.getstate(), np.random.get_state()), torch.set_num_threads
    collector, threads = (gc.freeze, gc.unfreeze), torch.get_num_threads()
    gc.freeze = gc.unfreeze = lambda: None
    try:
        with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_num_threads = set_num_threads
        if torch.cuda.is_available():  # on a CPU its kernels need the number that it has set
            torch.set_num_threads(threads)
        gc.freeze, gc.unfreeze = collector


def faulty() -> bool:
    """Return whether the installed vLLM is a CPU build with the bugs below."""
    from vllm.platforms import current_platform

    return current_platform.is_cpu() and installed()[1].startswith(f"{SUPPORTED}.")


def repair() -> None:
    if faulty():
        repair_sampling()
        repair_expert_parallelism()


def repair_sampling() -> None:
    """Fix speculative decoding above temperature 0: temperatures, top_k and top_p of draft tokens that are not int64
    were expanded into a temporary tensor, so that the kernel read uninitialised memory."""
    import vllm.utils.cpu_triton_utils as kernels

    def expand(output: Any, values: Any, ends: Any, replace_from: Any, replace_to: Any, MAX_NUM_TOKENS: Any = None):
        chosen = torch.where(values == replace_from, torch.as_tensor(replace_to, dtype=values.dtype), values)
        counts = torch.diff(ends.long(), prepend=torch.zeros(1, dtype=torch.long))
        output.copy_(torch.repeat_interleave(chosen, counts))

    kernels._expand_kernel_impl = expand


@cache
def repair_expert_parallelism() -> None:
    """Fix the experts' kernel, which takes an expert's global number for its number in this worker."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    original = CPUUnquantizedExperts.apply
    names = inspect.signature(original)

    def apply(*arguments: Any, **named: Any) -> None:
        given = names.bind(*arguments, **named)
        local_ids, weights = given.arguments["expert_map"], given.arguments["topk_weights"]
        if local_ids is not None:
            ids = local_ids[given.arguments["topk_ids"].long()]  # -1: an expert of another worker
            given.arguments["topk_weights"] = weights.masked_fill(ids < 0, 0)
            given.arguments["topk_ids"] = ids.clamp(min=0).to(given.arguments["topk_ids"].dtype)
        original(*given.args, **given.kwargs)

    CPUUnquantizedExperts.apply = apply


def repair_dispatcher() -> None:
    """Let vLLM's start look for its kernels in its own modules: in all modules it takes half a second, and fails on
    objects that return something for any name, such as llvmlite's library (numba loads it for n-grams)."""
    from vllm.triton_utils import dispatcher

    def get(owner: Any, name: str, *default: Any) -> Any:
        theirs = name != "__dict__" or str(getattr(owner, "__name__", "")).startswith("vllm.")
        return getattr(owner, name, *default) if theirs else None

    dispatcher.getattr = get


@contextmanager
def torchvision_stand_in() -> Iterator[None]:
    """Let vLLM's models that read images be imported without torchvision, whose wheel on the package index does not
    load beside torch's CPU build: they take functions without it from files of transformers that import it."""
    parts = ["torchvision", "transforms", "v2", "functional"]
    names = [] if find_spec(parts[0]) else [".".join(parts[:length]) for length in range(1, 5)]
    sys.modules.update({name: ModuleType(name) for name in names})
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


@cache
def repair_shared_memory_name() -> None:
    """Add the run's port to the name of the shared memory of an engine's ranks: vLLM uses one name for all runs on a
    machine."""
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    original = _CPUSHMDistributed.make_group_name

    def make_group_name(communicator: Any) -> str:
        return f"{original(communicator)}-{os.environ.get('MASTER_PORT', '')}"

    _CPUSHMDistributed.make_group_name = staticmethod(make_group_name)


def before_reload(model: nn.Module) -> None:
    """Reset the experts' kernels, because they pack the weights only when they are created."""
    for layer in model.modules():
        if getattr(getattr(layer, "quant_method", None), "moe_kernel", None) is not None:
            layer.quant_method.moe_kernel = None


def after_reload(model: nn.Module) -> None:
    """Pack a tied output matrix again: vLLM keeps the packed copy of the embeddings' former values."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    model = getattr(model, "language_model", model)
    head, embedding = getattr(model, "lm_head", None), getattr(getattr(model, "model", None), "embed_tokens", None)
    if head is not None and embedding is not None and head.weight is embedding.weight:
        dispatch_cpu_unquantized_gemm(head, remove_weight=False)


def start(arguments: dict[str, Any]) -> Any:
    """Start vLLM's engine in this process. Raises ConfigError if vLLM refuses the arguments."""
    global _live, _created_world
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    if not _live:
        _created_world = not torch.distributed.is_initialized()
    repair_dispatcher()
    repair_shared_memory_name()
    if arguments.get("dtype") == "bfloat16" and not torch.cuda.is_available():
        products.install_bf16()
    gc.freeze()  # collections then look at what vLLM creates alone
    try:
        with preserved_process_state():
            engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ConfigError(f"vllm: vLLM does not start with these arguments: {error}") from error
    engine.engine_core._finalizer.detach()  # it would destroy the trainer's process groups
    _live += 1
    return engine


def shut_down(engine: Any) -> None:
    """Shut an engine down like vLLM's own shutdown, but keep the trainer's process groups, which that destroys. The
    engines of a process share vLLM's groups, so these are destroyed with the last engine."""
    from vllm.distributed import parallel_state

    global _live
    _live -= 1
    core = engine.engine_core.engine_core
    core.structured_output_manager.clear_backend()
    with preserved_process_state():
        core.model_executor.shutdown()
    core.scheduler.shutdown()
    if not _live:
        parallel_state.destroy_model_parallel()
        if parallel_state._WORLD is not None:
            parallel_state._WORLD.destroy()
            parallel_state._WORLD = None
        if _created_world and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
