"""What vLLM's CPU build needs here: settings before its import, and work-arounds for four faults of version 0.32.

Most are silent: generation goes on, with wrong numbers. tests/parity/test_vllm.py notices the tied output matrix, and
experts that are used unpacked after a sync or belong to another worker; tests/unit/inference/vllm/test_engine.py the
temperatures.
"""

import gc
import inspect
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import nn

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer's threads live here too
}
FAULTY = ("0.32.",)

_live = 0  # engines in this process
_created_world = False  # there was no trainer: vLLM made the group of the whole world too


def prepare() -> None:
    """Before vLLM is imported; what the environment says already stays."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not torch.cuda.is_available():
        torch._dynamo.config.disable = True  # the first log-prob call would compile C++ for 10 s


@contextmanager
def bystanders() -> Iterator[None]:
    """vLLM's start seeds this process's random generators, swaps torch.set_num_threads and takes everything there is
    out of garbage collection: all of that is the trainer's."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    on_device = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    set_num_threads = torch.set_num_threads
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if on_device is not None:
            torch.cuda.set_rng_state(on_device)
        torch.set_num_threads = set_num_threads
        gc.unfreeze()


def faulty() -> bool:
    """Whether the installed vLLM is a CPU build with the faults below."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return False
    from megatron_rft.config.vllm import installed

    name, number = installed()
    return number.startswith(FAULTY) and version(name) == number


def repair() -> None:
    repair_sampling()
    repair_expert_parallelism()


def repair_sampling() -> None:
    """Speculative decoding above temperature 0: the temperatures, top_k and top_p of the drafted tokens were expanded
    into a temporary when they were no int64, so that they were uninitialised memory."""
    import vllm.utils.cpu_triton_utils as kernels

    def expand(output: Any, values: Any, ends: Any, replace_from: Any, replace_to: Any, MAX_NUM_TOKENS: Any = None):
        chosen = torch.where(values == replace_from, torch.as_tensor(replace_to, dtype=values.dtype), values)
        counts = torch.diff(ends.long(), prepend=torch.zeros(1, dtype=torch.long))
        output.copy_(torch.repeat_interleave(chosen, counts))

    kernels._expand_kernel_impl = expand


def repair_expert_parallelism() -> None:
    """The kernel of the experts takes the numbers that they have among all workers' for those that they have here."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    original = CPUUnquantizedExperts.apply
    if original.__module__ == __name__:
        return
    names = inspect.signature(original)

    def apply(*arguments: Any, **named: Any) -> None:
        given = names.bind(*arguments, **named)
        here, weights = given.arguments["expert_map"], given.arguments["topk_weights"]
        if here is not None:
            ids = here[given.arguments["topk_ids"].long()]  # -1: another worker's
            given.arguments["topk_weights"] = weights.masked_fill(ids < 0, 0)
            given.arguments["topk_ids"] = ids.clamp(min=0).to(given.arguments["topk_ids"].dtype)
        original(*given.args, **given.kwargs)

    CPUUnquantizedExperts.apply = apply


def bear_other_libraries() -> None:
    """At its start vLLM asks every object of every module for its `__dict__`, and falls over one that answers to any
    name: llvmlite's library, which numba brings in for n-grams, when a second engine of the process starts."""
    from vllm.triton_utils import dispatcher

    dispatcher.vars = lambda value: found if hasattr(found := vars(value), "get") else {}


def tell_runs_apart() -> None:
    """Ranks that are one engine meet in shared memory, whose name is the same for every run on the machine."""
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    original = _CPUSHMDistributed.make_group_name
    if original.__module__ == __name__:
        return

    def make_group_name(communicator: Any) -> str:
        return f"{original(communicator)}-{os.environ.get('MASTER_PORT', '')}"

    _CPUSHMDistributed.make_group_name = staticmethod(make_group_name)


def before_reload(model: nn.Module) -> None:
    """Experts were packed for their kernel once only, when that was made: it is made again."""
    for layer in model.modules():
        if getattr(getattr(layer, "quant_method", None), "moe_kernel", None) is not None:
            layer.quant_method.moe_kernel = None


def after_reload(model: nn.Module) -> None:
    """An output matrix that is tied to the embeddings went on with the packed copy of their former values."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    head, embedding = getattr(model, "lm_head", None), getattr(getattr(model, "model", None), "embed_tokens", None)
    if head is not None and embedding is not None and head.weight is embedding.weight:
        dispatch_cpu_unquantized_gemm(head, remove_weight=False)


def start(arguments: dict[str, Any]) -> Any:
    """vLLM's engine, in this process."""
    global _live, _created_world
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    if not _live:
        _created_world = not torch.distributed.is_initialized()
    bear_other_libraries()
    tell_runs_apart()
    with bystanders():
        engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
    engine.engine_core._finalizer.detach()  # would destroy the trainer's process groups
    _live += 1
    return engine


def shut_down(engine: Any) -> None:
    """As vLLM's own shutdown, but for the process groups. That destroys them all; here the trainer's stay, and vLLM's
    go with the last engine: those of a process share them."""
    from vllm.distributed import parallel_state

    global _live
    _live -= 1
    core = engine.engine_core.engine_core
    core.structured_output_manager.clear_backend()
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
