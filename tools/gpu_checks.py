"""The checks of gpu_kit.py: each yields rows of (what, found, bound or floor).

    python tools/gpu_checks.py FUNCTION [ARGUMENT ...] NAME FOLDER     imports, waits for a line, prints rows as JSON

gpu_kit.py starts it. Exit status 77: something that the check needs is not here. A run has its folder in FOLDER.
"""

import dataclasses
import faulthandler
import importlib.util
import itertools
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import patch

import psutil
import torch
from gpu_kit import MISSING, ROOT
from gpu_predictions import FREED, GROUP, LOGPROBS, MICRO_BATCH, OFFLOADED, QWEN3_8B, WIDTHS, Case, cases, depth
from setups import actor_of, arithmetic, fastest, qwen3, seconds, update_of
from shared_prompts import batch_of
from torch.distributions import Categorical
from transformers import GptOssConfig, Qwen3Config, Qwen3MoeConfig

from megatron_rft.__main__ import main as megatron_rft_command
from megatron_rft.conversion import hf_shapes
from megatron_rft.inference import weight_sync
from megatron_rft.inference.engine import checksum
from megatron_rft.inference.hf.engine import HFEngine
from megatron_rft.inference.process import EngineProcess
from megatron_rft.megatron import parallel, spec, weights
from megatron_rft.megatron.actor import Actor
from megatron_rft.megatron.vocabulary import logprobs_and_entropy
from megatron_rft.plan.devices import DEVICES, GIB
from megatron_rft.plan.model_shape import ModelShape
from megatron_rft.records import Batch

GPU = torch.cuda.is_available()
PRETENDED = "PRETEND_LIBRARY" in os.environ  # tools/cuda_without_gpu
LARGE = GPU and not PRETENDED  # elsewhere everything is small
ATTENTION = {"attention_backend": "unfused" if PRETENDED else "auto"}  # cuDNN's crashes there
DEVICE, NAME = torch.device("cuda" if GPU else "cpu"), torch.cuda.get_device_name() if GPU else ""
UNKNOWN = dataclasses.replace(DEVICES["h100"], flops=math.nan)
CHIP = next((chip for chip in reversed(DEVICES.values()) if chip.name in NAME), UNKNOWN)
Row = tuple[str, str, str]  # what, found, beside what
broken: list[str] = []  # what did not hold in this check, which goes on to its end


def bound(value: float, limit: float, what: str) -> Row:
    """Return a row; with it the check fails at its end if the value is above its limit, or is not a number."""
    if not value <= limit:
        broken.append(f"{what}: {value:.3g}, allowed {limit:.3g}")
    return what, f"{value:.2e}", f"<= {limit:.0e}"


def random(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [torch.randn(shape, device=DEVICE, dtype=dtype) for shape in shapes]


# ---- what the device can do


def ceilings() -> Iterator[Row]:
    """Yield the rates of a matrix product and of copies: on the device, to and from pinned memory."""
    if GPU:
        yield "device", NAME, f"{torch.cuda.mem_get_info()[1] / GIB:.0f} GiB, CUDA {torch.version.cuda}"
    size, dtype = (8192, torch.bfloat16) if LARGE else (1024, torch.float32)
    a, b = random((size, size), (size, size), dtype=dtype)
    yield "matrix product", f"{2 * size**3 / fastest(lambda: a @ b, 5)[0] / 1e12:.2f} TFLOP/s", str(dtype)
    there, other = torch.empty(2, (4 << 30) if LARGE else (64 << 20), dtype=torch.uint8, device=DEVICE)
    here = torch.empty(len(there) // 4, dtype=torch.uint8, pin_memory=GPU)  # pinning takes a second a GB
    part = there[: len(here)]
    for name, to, source in (("on", other, there), ("to", part, here), ("from", here, part)):
        passes, beside = (2, "bytes read and written") if name == "on" else (1, "pinned memory")
        rate = passes * len(source) / fastest(partial(to.copy_, source, non_blocking=True))[0]
        yield f"copy {name} the device", f"{rate / 1e9:.1f} GB/s", beside


# ---- log-probs


def logprob_arguments(dtype: torch.dtype, hidden_size: int) -> tuple[torch.Tensor, ...]:
    tokens, vocabulary, _ = LOGPROBS if LARGE else (256, 8192, 0)
    both = random((tokens, hidden_size), (vocabulary, hidden_size), dtype=dtype)
    return *(tensor * 0.25 for tensor in both), torch.randint(0, vocabulary, (tokens,), device=DEVICE)


def logprobs_in_float64() -> Iterator[Row]:
    for dtype, limit in ((torch.float32, 1e-4), (torch.bfloat16, 6e-2)):
        hidden, weight, targets = logprob_arguments(dtype, 256)
        found = logprobs_and_entropy(hidden, weight, targets, vocab_size=len(weight))
        true = Categorical(logits=hidden.double() @ weight.double().t())
        expected = {"log-prob": true.log_prob(targets), "entropy": true.entropy()}
        for name, values in zip(expected, found, strict=True):
            what = f"{name}, {dtype}, T={len(hidden)} V={len(weight)}, largest difference"
            yield bound((values - expected[name]).abs().max().item(), limit, what)


def logprob_speed() -> Iterator[Row]:
    hidden, weight, targets = logprob_arguments(torch.bfloat16 if GPU else torch.float32, LOGPROBS[2] if LARGE else 64)
    product = fastest(lambda: hidden @ weight.t())[0] * 1e3
    hidden.requires_grad_(), weight.requires_grad_()
    logits = len(hidden) * len(weight) * hidden.element_size() / 2**20
    for block in (16, 64, 256, 1024) if LARGE else (4, 16):
        options = {"vocab_size": len(weight), "block_bytes": block << 20}
        forward = partial(logprobs_and_entropy, hidden, weight, targets, **options)
        before = torch.cuda.memory_allocated()
        whole, peak = fastest(lambda forward=forward: torch.autograd.grad(forward()[0].sum(), (hidden, weight)))
        with torch.no_grad():
            alone, _ = fastest(forward)
        yield f"block {block} MiB: forward", f"{alone * 1e3:.1f} ms", f"one product takes {product:.1f} ms"
        yield f"block {block} MiB: forward + backward", f"{whole * 1e3:.1f} ms", f"four: {4 * product:.1f} ms"
        yield f"block {block} MiB: peak memory", f"{(peak - before) / 2**20:.0f} MiB", f"logits alone {logits:.0f} MiB"


# ---- losses and gradients against the CPU

CPU = "the CPU in fp32"
PARITY = {"fp32": (1e-5, 1e-3), "bf16": (1e-2, 1e-1), "fp8": (3e-2, 4e-1)}  # loss, gradient
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
SIZES = dict(zip(WIDTHS, (512, 128, 128, 4, 2, 64), strict=True)) | {"num_hidden_layers": 2, "initializer_range": 0.1}
MODELS = {
    "dense": qwen3("1m", initializer_range=0.1),
    "shared prompts": qwen3("1m", initializer_range=0.1),
    "mixture": Qwen3MoeConfig(**SIZES, **EXPERTS),
    "gpt-oss": GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=32),
}


def sequences(shared: bool) -> Batch:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(64, 128, (16,), generator=generator).tolist()
    texts = [torch.randint(0, 512, (n,), generator=generator).tolist() for n in lengths]
    return Batch.of([texts[i // 4 * 4 if shared else i][:32] for i in range(16)], [ids[32:] for ids in texts])


def gradients(kind: str, precision: str) -> dict[str, torch.Tensor]:
    """Return the gradients (by HF name) and the loss of a fixed small model and batch, in fp32 on the host."""
    config, batch = MODELS[kind], sequences(kind == "shared prompts")
    actor = actor_of(config, weights.random_tensors(config, 0), precision, 4096, megatron=ATTENTION)
    loss = actor.backward(*update_of(batch))["loss"]
    with actor.use_weights([p.main_grad.clone() for m in actor.models for p in m.parameters()]):
        found = {name: tensor.float().cpu().contiguous() for name, tensor in actor.stream()}
    return {**found, "loss": torch.tensor([loss])}


def distance(found: dict, expected: dict) -> dict[str, float]:
    """Return relative differences: of the loss, of all gradients together, and of the tensor where it is largest."""
    names = [name for name, tensor in expected.items() if tensor.any()]
    sizes = torch.stack([expected[name].norm() for name in names])
    apart = torch.stack([(found[name] - expected[name]).norm() for name in names])
    *each, loss = (apart / sizes).tolist()  # the loss is the last
    return {"loss": loss, "gradient": (apart[:-1].norm() / sizes[:-1].norm()).item(), "worst gradient": max(each)}


def parity(kinds: str, precisions: str) -> Iterator[Row]:
    """Compare with a process that computes on the CPU in fp32, and FP8 with bf16. Of a mixture in less than fp32 only
    the loss is bounded: where rounding sends a token to another expert, gradients differ."""
    with ProcessPoolExecutor(1, get_context("spawn")) as cpu:
        with patch.dict(os.environ, CUDA_VISIBLE_DEVICES=""):  # for the process, which starts here
            reference = {kind: cpu.submit(gradients, kind, "fp32") for kind in kinds.split("/")}
        found = {each: {kind: gradients(kind, each) for kind in reference} for each in precisions.split("/")}
    pairs = [(precision, CPU) for precision in found] + [("fp8", "bf16")] * ("fp8" in found)
    found[CPU] = {kind: computed.result() for kind, computed in reference.items()}
    for kind, (precision, other) in itertools.product(reference, pairs):
        routed = precision != "fp32" and kind in ("mixture", "gpt-oss")
        for what, value in distance(found[precision][kind], found[other][kind]).items():
            limit = math.inf if routed and what != "loss" else PARITY[precision][what != "loss"]
            yield bound(value, limit, f"{kind}, {precision} against {other}: {what}")


# ---- speed and memory of an 8B model's layers

MIXTURE = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, **EXPERTS}
MIXTURE |= {"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
SMALL = {} if LARGE else dict(zip(WIDTHS, (512, 64, 128, 4, 2, 16), strict=True))
SHORTER = 1 if LARGE else 32  # lengths are divided by it


def slice_actor(model: dict, precision: str) -> Actor:
    config = (Qwen3MoeConfig if "num_experts" in model else Qwen3Config)(**model)
    shapes = hf_shapes(config)

    def lookup(name: str) -> torch.Tensor:
        (tensor,) = random(shapes[name])
        return tensor * 0.02 if tensor.dim() > 1 else torch.ones_like(tensor)

    return actor_of(config, lookup, precision, MICRO_BATCH // SHORTER, megatron=ATTENTION)


def update_as(case: Case, actor: Actor) -> tuple[Batch, Callable, dict]:
    """Set the actor as the case has it. Returns the arguments of its update."""
    actor.layout = dataclasses.replace(actor.layout, share_prompts=case.shared)
    actor.config.recompute_granularity = "full" if case.recompute else None
    actor.config.recompute_method, actor.config.recompute_num_layers = "uniform", 1
    tokens = case.groups * GROUP * (case.prompt + case.response)
    return update_of(batch_of(case.prompt, GROUP, case.response, actor.hf_config.vocab_size, tokens))


def speed(precision: str, mixture: str = "") -> Iterator[Row]:
    """Yield tokens/s, MFU by the data sheet and peak memory of forward and backward passes, and the optimizer's time.
    The model has as many layers as fit by `plan`, with Transformer Engine two less and no recomputation, or one layer
    of a mixture."""
    fused, precision = spec.has_transformer_engine(), precision if GPU else "fp32"
    layers = 1 if mixture else depth(CHIP.usable) - 2 * fused if LARGE else 2
    model = QWEN3_8B | (MIXTURE if mixture else {}) | SMALL | {"num_hidden_layers": layers}
    actor, s = slice_actor(model, precision), ModelShape(model)
    yield "layers", str(layers), f"{s.whole() / 1e9:.2f} G parameters, {precision}"
    chosen = [case for case in cases(SHORTER) if not (fused and case.recompute)]
    update = update_as(chosen[0], actor)  # before all: the peaks are then those of a run, which has its moments
    times = [seconds(partial(actor.apply, actor.backward(*update), learning_rate=1e-6)) for _ in range(2)]
    yield "optimizer's step", f"{min(times) * 1e3:.0f} ms", "of two, gradients clipped"
    for case in chosen:
        yield from passes(actor, case, s)


def passes(actor: Actor, case: Case, s: ModelShape) -> Iterator[Row]:
    plan = f"plan {case.memory(s).phases['training'] / GIB:.1f} GiB"
    try:
        taken, peak = fastest(partial(actor.backward, *update_as(case, actor)), 2)
    except RuntimeError as error:  # out of memory is one; the other cases are still worth their time
        broken.append(f"{case}: {error}")
        yield f"{case}: peak memory", str(error).partition(". ")[0], plan
    else:
        for what, text in case.figures(s, CHIP, taken, peak).items():
            yield what, text, plan if "memory" in what else f"{taken * 1e3:.0f} ms"


def offload() -> Iterator[Row]:
    """Check that every bit of the optimizer's state comes back from the host, and yield times and freed memory."""
    actor = slice_actor(OFFLOADED | SMALL, "bf16")
    step = partial(actor.step, *update_as(cases(SHORTER)[0], actor), learning_rate=1e-6)
    step()
    state, sums = actor.training_state, [checksum(tensor) for tensor in actor.optimizer.tensors()]
    held = torch.cuda.memory_allocated()
    for number in ("first", "second"):
        away, freed = seconds(state.offload), held - torch.cuda.memory_allocated()
        moved = sum(size for _, size, copy in state.away if copy is not None) / 1e9
        for way, taken in (("to the host", away), ("back", seconds(state.restore))):
            yield f"{way}, {number} time", f"{taken * 1e3:.0f} ms", f"{moved / taken:.1f} GB/s"
    yield FREED, f"{freed / GIB:.2f} GiB", "gradients and optimizer"
    if sums != [checksum(tensor) for tensor in actor.optimizer.tensors()]:
        raise AssertionError("the optimizer's state came back with other bits")
    yield "loss of the next step", f"{step()['loss']:.4f}", "every bit of the state came back"


# ---- weights to an engine's process


def engine_process() -> Iterator[Row]:
    """Check that every bit arrives in another process after each sync, and in a process that replaces a killed one."""
    config, taken = qwen3("1.7b" if LARGE else "1m"), []
    build, shapes = partial(HFEngine, config, torch.bfloat16, DEVICE), hf_shapes(config)
    with tempfile.NamedTemporaryFile() as log, closing(EngineProcess(build, "engine", Path(log.name))) as engine:
        yield "transport", engine.transport, ""
        if GPU and engine.transport != "CUDA IPC":
            raise AssertionError(f"weights go by {engine.transport}, not by CUDA IPC")
        for version in range(3):
            tensors = dict(zip(shapes, random(*shapes.values()), strict=True))
            pushed = weight_sync.send(tensors.items(), engine, version, verify=True)  # RunFailed where a bit differs
            taken.append(weight_sync.send(tensors.items(), engine, version)["sync/seconds"])
        yield "bits that differ after 3 syncs", "0", f"{pushed['sync/tensors']:.0f} tensors"
        size, pairs = pushed["sync/bytes"] / 1e9, [(torch.empty_like(tensor), tensor) for tensor in tensors.values()]
        copy, _ = fastest(lambda: [to.copy_(tensor) for to, tensor in pairs])
        yield "a sync", f"{size / min(taken[1:]):.1f} GB/s", f"{size:.2f} GB; copied in one process {size / copy:.1f}"
        engine.process.kill()
        engine.start()
        weight_sync.send(tensors.items(), engine, 3, verify=True)
        yield "the same in the place of a killed process", engine.transport, ""


# ---- whole runs


def arguments(recipe: str, name: str, folder: str) -> list[str]:
    """Return those of `megatron-rft` for a run of the quickstart."""
    if PRETENDED:  # vLLM's kernels do nothing there, nothing is compiled, and memory is the host's
        smaller = "faults.on_mismatch=warn vllm.enforce_eager=true vllm.kv_cache_memory_bytes=268435456"
        recipe = recipe.replace("faults.on_mismatch=stop", smaller)
    recipe, *options = recipe.replace("FOLDER", folder).split()
    output = f"run.output_dir={folder}/{name.replace(' ', '_')}"
    return ["train", str(ROOT / "examples" / "quickstart" / recipe), output, "data.test=null", *options]


def main(function: str, *given: str) -> int:
    """Do a check. Returns the exit status."""
    *given, name, folder = given
    print(json.dumps(("imports", f"{time.time() - psutil.Process().create_time():.1f} s", "")), flush=True)
    if not (end := sys.stdin.readline()):  # the check imports before its turn
        return 1  # which never comes: the call was killed
    faulthandler.dump_traceback_later(max(1, float(end) - time.monotonic() - 1))  # where it is just before it is killed
    library = name.split()[0].strip(":")
    if not {"TE": spec.has_transformer_engine(), "vLLM": importlib.util.find_spec("vllm")}.get(library, True):
        print(f"{library} is not installed, or no GPU is here")
        return MISSING
    if function == "run":
        arithmetic.write_model_folder(f"{folder}/model")  # of the warm start
        return megatron_rft_command(arguments(*given, name, folder))
    if library != "TE":
        spec.is_installed = lambda: False  # torch's layers even where Transformer Engine is installed
    torch.manual_seed(0)
    for row in globals()[function](*given):
        print(json.dumps(row), flush=True)  # of a check that is killed this is all
    print("\n".join(broken), flush=True)
    return bool(broken)


if __name__ == "__main__":
    status = main(*sys.argv[1:])
    if torch.distributed.is_initialized():
        parallel.shutdown()
    sys.exit(status)
