"""The checks of gpu_kit.py that need no engine: each yields rows of (what, found, bound or floor).

    python tools/gpu_checks.py NAME         prints the rows of one check as a table; 77: something it needs is not here

What compares with the CPU computes there in fp32, in a process of its own from which the GPU is hidden.
"""

import dataclasses
import importlib.util
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from unittest import mock

BEGIN = time.perf_counter()
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent / "bench")]

import torch  # noqa: E402
from gpu_predictions import CASES, LOGPROBS, MICRO_BATCH, QWEN3_8B, SMALL, Case, depth, figures, memory  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from setups import ADAMW, qwen3  # noqa: E402
from transformers import GptOssConfig, PretrainedConfig, Qwen3Config, Qwen3MoeConfig  # noqa: E402

from megatron_rft.config import Batching, Megatron  # noqa: E402
from megatron_rft.config.algorithms.offline import SFT as Options  # noqa: E402
from megatron_rft.conversion import hf_shapes  # noqa: E402
from megatron_rft.inference import weight_sync  # noqa: E402
from megatron_rft.inference.engine import checksum  # noqa: E402
from megatron_rft.inference.hf.engine import HFEngine  # noqa: E402
from megatron_rft.inference.process import EngineProcess  # noqa: E402
from megatron_rft.megatron import parallel, spec, weights  # noqa: E402
from megatron_rft.megatron.actor import Actor  # noqa: E402
from megatron_rft.megatron.vocabulary import logprobs_and_entropy  # noqa: E402
from megatron_rft.objectives.base import counts  # noqa: E402
from megatron_rft.objectives.sft import SFT  # noqa: E402
from megatron_rft.plan.devices import DEVICES, GIB  # noqa: E402
from megatron_rft.plan.model_shape import ModelShape  # noqa: E402
from megatron_rft.records import Batch  # noqa: E402

GPU = torch.cuda.is_available()
LARGE = GPU and "PRETEND_LIBRARY" not in os.environ  # elsewhere, also on tools/cuda_without_gpu, everything is small
DEVICE = torch.device("cuda" if GPU else "cpu")
MISSING = 77  # exit status
Row = tuple[str, str, str]  # what, found, beside what
broken: list[str] = []  # what did not hold in this check, which goes on to its end


class NotRun(Exception):
    """This check cannot run here; the message says what is missing."""


def need(module: str, capability: tuple[int, int] = (0, 0)) -> None:
    if importlib.util.find_spec(module) is None:
        raise NotRun(f"{module} is not installed")
    if capability > (torch.cuda.get_device_capability() if GPU else (0, 0)):
        raise NotRun(f"no CUDA device of capability {capability[0]}.{capability[1]}")


def bound(value: float, limit: float, what: str) -> Row:
    """Return a row; with it the check fails at its end if the value is above its limit, or is not a number."""
    if not value <= limit:
        broken.append(f"{what}: {value:.3g}, allowed {limit:.3g}")
    return what, f"{value:.2e}", f"<= {limit:.0e}"


def clock() -> float:
    if GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds(function: Callable[[], object], repeats: int = 3) -> float:
    """Return the time of the fastest of some runs, after a warm-up run."""
    times = []
    for _ in range(repeats + 1):
        begin = clock()
        function()
        times.append(clock() - begin)
    return min(times[1:])


def measured(function: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Return `seconds`, and the allocator's peak in bytes meanwhile, NaN without a GPU."""
    if not GPU:
        return seconds(function, repeats), float("nan")
    torch.cuda.reset_peak_memory_stats()
    return seconds(function, repeats), torch.cuda.max_memory_allocated()


# ---- what the device can do


def ceilings() -> Iterator[Row]:
    """Yield versions, and the rates of a matrix product and of copies: on the device, to and from pinned memory."""
    yield "python", platform.python_version(), ""
    if GPU:
        about = torch.cuda.get_device_properties(0)
        yield "device", about.name, f"{about.total_memory / GIB:.0f} GiB, CUDA {torch.version.cuda}"
    size, dtype = (8192, torch.bfloat16) if LARGE else (1024, torch.float32)
    a, b = (torch.randn(size, size, device=DEVICE, dtype=dtype) for _ in range(2))
    yield "matrix product", f"{2 * size**3 / seconds(lambda: a @ b, 5) / 1e12:.2f} TFLOP/s", str(dtype)
    size = (4 << 30) if LARGE else (64 << 20)
    there, other = (torch.empty(size, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    here = torch.empty(size, dtype=torch.uint8, pin_memory=GPU)
    copies = {
        "on the device": (other, there, 2),
        "to the device": (there, here, 1),
        "from the device": (here, there, 1),
    }
    for name, (to, source, passes) in copies.items():
        rate = passes * size / seconds(lambda to=to, source=source: to.copy_(source, non_blocking=True))
        yield f"copy {name}", f"{rate / 1e9:.1f} GB/s", "bytes read and written" if passes == 2 else "pinned memory"


# ---- log-probs


def logprob_arguments(dtype: torch.dtype, hidden_size: int) -> tuple[torch.Tensor, ...]:
    tokens, vocabulary, _ = LOGPROBS if LARGE else (256, 8192, 0)
    generator = torch.Generator(DEVICE).manual_seed(0)
    make = partial(torch.randn, generator=generator, device=DEVICE)
    hidden, weight = make(tokens, hidden_size).to(dtype) * 0.25, make(vocabulary, hidden_size).to(dtype) * 0.25
    return hidden, weight, torch.randint(0, vocabulary, (tokens,), generator=generator, device=DEVICE)


def logprobs_in_float64() -> Iterator[Row]:
    for dtype, limit in ((torch.float32, 1e-4), (torch.bfloat16, 6e-2)):
        hidden, weight, targets = logprob_arguments(dtype, 256)
        found = logprobs_and_entropy(hidden, weight, targets, vocab_size=len(weight))
        worst, wide = [0.0, 0.0], weight.double().t()
        for part in torch.arange(len(hidden), device=DEVICE).split(512):
            full = (hidden[part].double() @ wide).log_softmax(-1)
            true = full.gather(1, targets[part, None])[:, 0], -(full.exp() * full).sum(-1)
            differences = [(f[part] - t).abs().max().item() for f, t in zip(found, true, strict=True)]
            worst = [max(pair) for pair in zip(worst, differences, strict=True)]
        for name, value in zip(("log-prob", "entropy"), worst, strict=True):
            yield bound(value, limit, f"{name}, {dtype}, T={len(hidden)} V={len(weight)}, largest difference")


def logprob_speed() -> Iterator[Row]:
    dtype = torch.bfloat16 if GPU else torch.float32
    hidden, weight, targets = logprob_arguments(dtype, LOGPROBS[2] if LARGE else 64)
    hidden.requires_grad_(), weight.requires_grad_()
    floor = seconds(lambda: hidden.detach() @ weight.detach().t())
    logits = len(hidden) * len(weight) * dtype.itemsize
    for block in (16, 64, 256, 1024) if LARGE else (4, 16):

        def both(block: int = block) -> None:
            hidden.grad = weight.grad = None
            logprobs_and_entropy(hidden, weight, targets, vocab_size=len(weight), block_bytes=block << 20)[
                0
            ].sum().backward()

        with torch.no_grad():
            options = {"vocab_size": len(weight), "block_bytes": block << 20}
            alone = seconds(lambda options=options: logprobs_and_entropy(hidden, weight, targets, **options))
        hidden.grad = weight.grad = None
        before = torch.cuda.memory_allocated() if GPU else 0
        whole, peak = measured(both, 3)
        yield f"block {block} MiB: forward", f"{alone * 1e3:.1f} ms", f"one product takes {floor * 1e3:.1f} ms"
        yield f"block {block} MiB: forward + backward", f"{whole * 1e3:.1f} ms", f"four: {4 * floor * 1e3:.1f} ms"
        yield f"block {block} MiB: peak memory", mib(peak - before), f"logits alone {mib(logits)}"


def mib(size: float) -> str:
    return f"{size / 2**20:.0f} MiB"


# ---- losses and gradients against the CPU

PARITY = {"fp32": (1e-5, 1e-3), "bf16": (1e-2, 1e-1), "fp8": (3e-2, 4e-1)}  # loss, gradient
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}


def config_of(kind: str) -> PretrainedConfig:
    dense = qwen3("1m", initializer_range=0.1)
    if kind in ("dense", "shared prompts"):
        return dense
    sizes = {
        name: getattr(dense, name) for name in ("vocab_size", "hidden_size", "num_attention_heads", "eos_token_id")
    }
    sizes |= {"num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": 2, "initializer_range": 0.1}
    if kind == "mixture":
        return Qwen3MoeConfig(**sizes, **EXPERTS)
    return GptOssConfig(**sizes, num_local_experts=4, num_experts_per_tok=2, intermediate_size=128, sliding_window=32)


def sequences(shared: bool) -> Batch:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(64, 128, (16,), generator=generator).tolist()
    texts = [torch.randint(0, 512, (n,), generator=generator).tolist() for n in lengths]
    return Batch.of([texts[i // 4 * 4 if shared else i][:32] for i in range(16)], [ids[32:] for ids in texts])


def make_actor(config: PretrainedConfig, precision: str, tokens: int, lookup: Callable[[str], torch.Tensor]) -> Actor:
    if not torch.distributed.is_initialized():
        parallel.initialize(Megatron())
    for kernel in ("FLASH", "FUSED", "UNFUSED"):  # the last model's choice, which megatron-core leaves behind
        os.environ.pop(f"NVTE_{kernel}_ATTN", None)
    optimizer = ADAMW | {"use_distributed_optimizer": True}
    pretended = "PRETEND_LIBRARY" in os.environ and spec.has_transformer_engine()  # cuDNN crashes there
    megatron = Megatron(attention_backend="unfused" if pretended else "auto")
    actor = Actor(config, megatron, Batching(micro_batch_tokens=tokens), precision, optimizer=optimizer)
    actor.load(lookup)
    return actor


def gradients(kind: str, precision: str) -> dict[str, torch.Tensor]:
    """Return the gradients (by HF name) and the loss of a fixed small model and batch, in fp32 on the host."""
    config, batch = config_of(kind), sequences(kind == "shared prompts")
    actor = make_actor(config, precision, 4096, weights.random_tensors(config, 0))
    loss = actor.backward(batch, SFT(Options()).loss, counts(batch))["loss"]
    with actor.use_weights([p.main_grad.clone() for m in actor.models for p in m.parameters()]):
        found = {name: tensor.float().cpu().contiguous() for name, tensor in actor.stream()}
    return {**found, "loss": torch.tensor([loss])}


def cpu_reference(kind: str, folder: str) -> Callable[[], dict[str, torch.Tensor]]:
    """Compute `gradients(kind, "fp32")` in a process that sees no GPU; the function returned waits for them."""
    path = f"{folder}/{kind}.safetensors"
    command = [sys.executable, __file__, "reference", kind, path]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def result() -> dict[str, torch.Tensor]:
        errors = process.communicate()[1]
        if process.returncode:
            raise RuntimeError(f"the CPU reference failed: {errors[-2000:]}")
        return load_file(path)

    return result


def distance(found: dict, expected: dict) -> dict[str, float]:
    """Return relative differences: of the loss, of all gradients together, and of the tensor where it is largest."""
    names = [name for name in expected if name != "loss" and expected[name].any()]
    apart = {name: (found[name] - expected[name]).norm() for name in names}
    whole = torch.stack([expected[name].norm() for name in names]).norm()
    return {
        "loss": ((found["loss"] - expected["loss"]).abs() / expected["loss"]).item(),
        "gradient": (torch.stack([*apart.values()]).norm() / whole).item(),
        "worst gradient": max((apart[name] / expected[name].norm()).item() for name in names),
    }


def torch_layers(layers: str):
    """A context in which models have torch's layers even where Transformer Engine is installed."""
    return mock.patch.object(spec, "has_transformer_engine", lambda: False) if layers == "torch" else nullcontext()


def parity(layers: str, kinds: tuple[str, ...], *precisions: str) -> Iterator[Row]:
    """Compare with the CPU in fp32, and FP8 with bf16. Of a mixture in less than fp32 only the loss is bounded: where
    rounding sends a token to another expert, gradients differ."""
    if layers != "torch":
        need("transformer_engine", (8, 9) if "fp8" in precisions else (0, 0))
    with tempfile.TemporaryDirectory() as folder:
        references = {kind: cpu_reference(kind, folder) for kind in kinds}
        for kind in kinds:
            yield from _parity_of(kind, layers, precisions, references[kind])


def _parity_of(
    kind: str, layers: str, precisions: tuple[str, ...], reference: Callable[[], dict[str, torch.Tensor]]
) -> Iterator[Row]:
    found = {}
    for precision in precisions:
        with torch_layers(layers):
            found[precision] = gradients(kind, precision)
    found["the CPU in fp32"] = reference()
    pairs = [(precision, "the CPU in fp32") for precision in precisions]
    for precision, other in pairs + [("fp8", "bf16")] * ("fp8" in precisions):
        routed = precision != "fp32" and kind in ("mixture", "gpt-oss")
        for what, value in distance(found[precision], found[other]).items():
            limit = PARITY[precision][what != "loss"]
            limit = float("inf") if routed and what != "loss" else limit
            yield bound(value, limit, f"{kind}, {precision} against {other}: {what}")


# ---- speed and memory of an 8B model's layers

MIXTURE = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, **EXPERTS}
MIXTURE |= {"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}


def slice_actor(config: dict, precision: str) -> Actor:
    config = (Qwen3MoeConfig if "num_experts" in config else Qwen3Config)(**config)
    generator, shapes = torch.Generator(DEVICE).manual_seed(0), hf_shapes(config)

    def lookup(name: str) -> torch.Tensor:
        tensor = torch.randn(shapes[name], generator=generator, device=DEVICE, dtype=torch.bfloat16)
        return tensor * 0.02 if tensor.dim() > 1 else torch.ones_like(tensor)

    return make_actor(config, precision, MICRO_BATCH if LARGE else MICRO_BATCH // 32, lookup)


def case_batch(case: Case, vocabulary: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    ids = lambda *size: torch.randint(1, vocabulary, size, generator=generator).tolist()  # noqa: E731
    count = case.groups * 8
    prompts = ids(case.groups, case.prompt)
    return Batch.of([prompts[i // 8] for i in range(count)], ids(count, case.response))


def speed(layers: str, precision: str, cases: list[Case], model: dict, fewer: int = 0) -> Iterator[Row]:
    """Yield tokens/s, MFU by the data sheet and peak memory of forward and backward passes, and the optimizer's time.
    `fewer`: layers than fit by `plan`."""
    if layers != "torch":
        need("transformer_engine", (8, 9) if precision == "fp8" else (0, 0))
    if not LARGE:
        model, precision = model | SMALL, precision if GPU else "fp32"
        cases = [dataclasses.replace(c, prompt=c.prompt // 32, response=c.response // 32) for c in cases]
    size = torch.cuda.get_device_properties(0).total_memory if GPU else 0
    unknown = dataclasses.replace(DEVICES["h100"], flops=float("nan"), memory=size)
    known = (c for c in reversed(DEVICES.values()) if GPU and c.name in torch.cuda.get_device_name())
    chip = next(known, unknown)
    model = {"num_hidden_layers": max(2, depth(chip.usable) - fewer) if LARGE else 2} | model
    s = ModelShape(model)
    with torch_layers(layers):
        actor = slice_actor(model, precision)
    yield "layers", str(s.layers), f"{s.whole() / 1e9:.2f} G parameters, {precision}"

    def work_of(case: Case) -> Callable[[], dict]:
        batch = case_batch(case, s.vocabulary)
        actor.layout = dataclasses.replace(actor.layout, share_prompts=case.shared)
        actor.config.recompute_granularity = "full" if case.recompute else None
        actor.config.recompute_method, actor.config.recompute_num_layers = "uniform", 1
        return partial(actor.backward, batch, SFT(Options()).loss, counts(batch))

    work, times = work_of(cases[-1]), []  # before all: the peaks are then those of a run, which has its moments
    for _ in range(3):
        computed, begin = work(), clock()
        actor.apply(computed, learning_rate=1e-6)
        times.append(clock() - begin)
    yield "optimizer's step", f"{min(times) * 1e3:.0f} ms", "of three, gradients clipped"
    for case in cases:
        work = work_of(case)
        plan = memory(case, s).phases["training"] / GIB
        try:
            taken, peak = measured(work, 2)
        except RuntimeError as error:  # out of memory is one; the other cases are still worth their time
            broken.append(f"{case.name}: {error}")
            yield f"{case.name}: peak memory", str(error).partition(". ")[0], f"plan {plan:.1f} GiB"
            continue
        for what, text in figures(case, s, chip, taken, peak).items():
            yield what, text, f"plan {plan:.1f} GiB" if "memory" in what else f"{taken * 1e3:.0f} ms"


def offload() -> Iterator[Row]:
    """Check that every bit of the optimizer's state comes back from the host, and yield times and freed memory."""
    actor = slice_actor(QWEN3_8B | {"num_hidden_layers": 4} | ({} if LARGE else SMALL), "bf16")
    case = CASES[0] if LARGE else dataclasses.replace(CASES[0], prompt=32, response=4)
    batch = case_batch(case, actor.hf_config.vocab_size)
    step = partial(actor.step, batch, SFT(Options()).loss, counts(batch), learning_rate=1e-6)
    step()
    state, sums = actor.training_state, [checksum(tensor) for tensor in actor.optimizer.tensors()]
    for number in ("first", "second"):
        held, begin = torch.cuda.memory_allocated() if GPU else 0, clock()
        state.offload()
        taken, moved = clock() - begin, sum(size for _, size, copy in state.away if copy is not None)
        freed = held - torch.cuda.memory_allocated() if GPU else sum(size for _, size, _ in state.away)
        yield f"to the host, {number} time", f"{taken * 1e3:.0f} ms", f"{moved / taken / 1e9:.1f} GB/s"
        begin = clock()
        state.restore()
        taken = clock() - begin
        yield f"back, {number} time", f"{taken * 1e3:.0f} ms", f"{moved / taken / 1e9:.1f} GB/s"
    yield "memory that it frees", f"{freed / GIB:.2f} GiB", "gradients and optimizer"
    if sums != [checksum(tensor) for tensor in actor.optimizer.tensors()]:
        raise AssertionError("the optimizer's state came back with other bits")
    yield "loss of the next step", f"{step()['loss']:.4f}", "every bit of the state came back"


# ---- weights to an engine's process


def random_weights(config: PretrainedConfig, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    make = partial(torch.randn, generator=generator, device=DEVICE, dtype=torch.bfloat16)
    return {name: make(shape) for name, shape in hf_shapes(config).items()}


def engine_process() -> Iterator[Row]:
    """Check that every bit of every tensor arrives in another process after each sync, and in a process that replaces
    a killed one."""
    config = qwen3("1.7b" if LARGE else "1m")
    build = partial(HFEngine, config, torch.bfloat16, DEVICE)
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(EngineProcess(build, "engine", Path(folder, "log"))) as engine,
    ):
        yield "transport", engine.transport, ""
        if GPU and engine.transport != "CUDA IPC":
            raise AssertionError(f"weights go by {engine.transport}, not by CUDA IPC")
        taken = []
        for version in range(3):
            tensors = random_weights(config, version)
            pushed = weight_sync.send(tensors.items(), engine, version, verify=True)  # RunFailed where a bit differs
            taken.append(weight_sync.send(tensors.items(), engine, version)["sync/seconds"])
        yield "bits that differ after 3 syncs", "0", f"{pushed['sync/tensors']:.0f} tensors"
        copies = [torch.empty_like(tensor) for tensor in tensors.values()]
        copy = seconds(lambda: [to.copy_(tensor) for to, tensor in zip(copies, tensors.values(), strict=True)])
        size = pushed["sync/bytes"] / 1e9
        yield "a sync", f"{size / min(taken[1:]):.1f} GB/s", f"{size:.2f} GB; copied in one process {size / copy:.1f}"
        engine.process.kill()
        engine.start()
        weight_sync.send(random_weights(config, 5).items(), engine, 5, verify=True)
        yield "the same in the place of a killed process", engine.transport, ""


TE, APART = "transformer_engine", [case for case in CASES if not case.recompute]
PARTS: dict[str, Callable[[], Iterator[Row]]] = {
    "ceilings": ceilings,
    "slice of Qwen3-8B": partial(speed, "torch", "bf16", CASES, QWEN3_8B),
    "gradients against the CPU": partial(parity, "torch", ("dense", "shared prompts"), "fp32", "bf16"),
    "log-probs against float64": logprobs_in_float64,
    "log-probs: time and memory": logprob_speed,
    "weights to an engine process": engine_process,
    "offload of the trainer": offload,
    "TE: parity": partial(parity, TE, ("dense",), "bf16", "fp8"),
    "TE: slice in bf16": partial(speed, TE, "bf16", APART, QWEN3_8B, 2),
    "TE: slice in FP8": partial(speed, TE, "fp8", APART, QWEN3_8B, 2),
    "TE: shared prompts": partial(parity, TE, ("shared prompts",), "bf16"),
    "TE: grouped experts": partial(parity, TE, ("mixture",), "bf16", "fp8"),
    "TE: gpt-oss": partial(parity, TE, ("gpt-oss",), "bf16"),
    "TE: a mixture layer": partial(speed, TE, "bf16", APART, QWEN3_8B | MIXTURE | {"num_hidden_layers": 1}),
}


def main(parts: dict[str, Callable[[], Iterator[Row]]]) -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    line = "| {} | {} | {} |".format
    print(line("imports", f"{time.perf_counter() - BEGIN:.1f} s", ""), flush=True)
    sys.stdin.readline()  # gpu_kit.py lets a check import before its turn
    try:
        for row in parts[sys.argv[1]]():
            print(line(*row), flush=True)  # of a check that is killed this is all
        if broken:
            sys.exit("\n".join(broken))
    except NotRun as reason:
        print(reason, flush=True)
        sys.exit(MISSING)
    finally:
        if torch.distributed.is_initialized():
            parallel.shutdown()


if __name__ == "__main__":
    if sys.argv[1] == "reference":
        with torch_layers("torch"):
            save_file(gradients(sys.argv[2], "fp32"), sys.argv[3])
        parallel.shutdown()
    else:
        main(PARTS)
