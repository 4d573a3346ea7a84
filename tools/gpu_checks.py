"""The checks of gpu_checks.sh: each part returns rows of (what, found, bound or floor), or the reason why it cannot
run.

A part that needs something which is not here is named with the reason; a part that raises is a failure. The reference
for parity is computed on the CPU in fp32 by a process of its own, from which the GPU is hidden.
"""

import argparse
import functools
import gc
import importlib.metadata
import json
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent / "bench"))

import torch  # noqa: E402
from gpu_checks_common import DEVICE, GPU, NotRun, Row, bound, need, need_gpu, seconds, wait, without_rank  # noqa: E402
from gpu_checks_rollout import DECODING, EXPERTS, TRANSPORT, VLLM  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from setups import actor_like, hf_model, qwen3  # noqa: E402

from megatron_rft.config.algorithms.offline import SFT as Options  # noqa: E402
from megatron_rft.megatron import parallel, spec  # noqa: E402
from megatron_rft.megatron.vocabulary import logprobs_and_entropy  # noqa: E402
from megatron_rft.objectives.base import counts  # noqa: E402
from megatron_rft.objectives.sft import SFT  # noqa: E402
from megatron_rft.records import Batch  # noqa: E402

# Dense bf16 TFLOP/s without sparsity, from the makers' data sheets.
DATA_SHEET = {"H100": 989, "H200": 989, "A100": 312, "L40S": 362, "B200": 2250, "GH200": 989}


# ---- a small model, the same everywhere


def sequences(vocab: int, count: int, longest: int) -> Batch:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(longest // 2, longest, (count,), generator=generator).tolist()
    texts = [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in lengths]
    return Batch.of([ids[:4] for ids in texts], [ids[4:] for ids in texts])


def gradients(precision: str) -> dict[str, torch.Tensor]:
    """Return the gradients (by HF name) and the loss of a fixed small model and batch, in fp32 on the host."""
    model = hf_model(qwen3("1m", initializer_range=0.1), "fp32")
    actor = actor_like(model, precision, micro_batch_tokens=4096)
    batch = sequences(512, 16, 128)
    loss = actor.backward(batch, SFT(Options()).loss, counts(batch))["loss"]
    main_grads = [p.main_grad.clone() for m in actor.models for p in m.parameters()]
    with actor.use_weights(main_grads):
        found = {name: tensor.float().cpu().contiguous() for name, tensor in actor.stream()}
    return {**found, "loss": torch.tensor([loss])}


@functools.cache
def cpu_reference() -> dict[str, torch.Tensor]:
    """Return `gradients("fp32")` from a separate single process that sees no GPU."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/reference.safetensors"
        run = subprocess.run(
            [sys.executable, __file__, "--write-reference", path],
            env={**without_rank(), "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
        )
        if run.returncode:
            raise RuntimeError(f"the CPU reference failed: {run.stderr[-2000:]}")
        return load_file(path)


def distance(found: dict, expected: dict) -> tuple[float, float]:
    """Return (relative loss difference, largest relative gradient difference of a tensor)."""
    loss = ((found["loss"] - expected["loss"]).abs() / expected["loss"]).item()
    names = expected.keys() - {"loss"}
    return loss, max(((found[n] - expected[n]).norm() / expected[n].norm()).item() for n in names)


@contextmanager
def torch_layers() -> Iterator[None]:
    """Build models of torch's layers even where Transformer Engine is installed."""
    with mock.patch.object(spec, "has_transformer_engine", lambda: False):
        yield


# ---- the parts


def versions() -> Iterator[Row]:
    yield "python", platform.python_version(), ""
    for name in (
        "torch",
        "megatron-core",
        "transformer-engine",
        "flash-attn",
        "apex",
        "transformers",
        "triton",
        "vllm",
    ):
        try:
            yield name, importlib.metadata.version(name), ""
        except importlib.metadata.PackageNotFoundError:
            yield name, "not installed", ""
    if not GPU:
        yield "device", "no CUDA device", ""
        return
    yield "device", f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}", ""
    yield "memory", f"{torch.cuda.get_device_properties(0).total_memory / 2**30:.0f} GiB", ""
    yield "CUDA, NCCL", f"{torch.version.cuda}, {'.'.join(map(str, torch.cuda.nccl.version()))}", ""


PARITY = {"fp32": (1e-5, 1e-3), "bf16": (1e-2, 1e-1), "fp8": (3e-2, 4e-1)}  # loss, gradient (worst tensor)


def parity(precision: str, layers: str) -> Iterator[Row]:
    if layers == "transformer_engine":
        need_gpu((8, 9) if precision == "fp8" else (0, 0))
        need("transformer_engine")
        found = gradients(precision)
    else:
        with torch_layers():
            found = gradients(precision)
    loss, gradient = distance(found, cpu_reference())
    yield bound(loss, PARITY[precision][0], "loss, relative to the CPU's in fp32")
    yield bound(gradient, PARITY[precision][1], "gradient, worst tensor, relative")


def training(precision: str) -> Iterator[Row]:
    """Make twenty steps on one batch: the loss must fall, and every step must be applied."""
    if precision == "fp8":
        need_gpu((8, 9))
        need("transformer_engine")
    actor = actor_like(hf_model(qwen3("1m"), "fp32"), precision, micro_batch_tokens=2048)
    batch = sequences(512, 16, 128)
    metrics = [actor.step(batch, SFT(Options()).loss, counts(batch), learning_rate=2e-3) for _ in range(20)]
    losses, skipped = [m["loss"] for m in metrics], sum(m["skipped"] for m in metrics)
    yield bound(skipped, 0, "steps refused")
    yield bound(losses[-1] / losses[0], 0.9, f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, ratio")


def logprob_accuracy() -> Iterator[Row]:
    for dtype, limit in ((torch.float32, 1e-4), (torch.bfloat16, 6e-2)):
        generator = torch.Generator().manual_seed(0)
        hidden, weight = (torch.randn(n, 256, generator=generator).to(dtype) for n in (512, 20000))
        hidden, weight = hidden * 0.25, weight * 0.25
        targets = torch.randint(0, 20000, (512,), generator=generator)
        full = (hidden.double() @ weight.double().t()).log_softmax(-1)
        true = full.gather(1, targets[:, None])[:, 0], -(full.exp() * full).sum(-1)
        found = logprobs_and_entropy(
            *(t.to(DEVICE) for t in (hidden, weight, targets)), vocab_size=20000, block_bytes=4 << 20
        )
        for name, ours, exact in zip(("log-prob", "entropy"), found, true, strict=True):
            yield bound((ours.cpu().double() - exact).abs().max().item(), limit, f"{name}, {dtype}, largest difference")


def matmul_rate(size: int = 8192 if GPU else 1024) -> float:
    """Return FLOP/s of one large bf16 (on the CPU: fp32) product, the practical peak from which floors are computed."""
    a, b = (torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16 if GPU else torch.float32) for _ in range(2))
    return 2 * size**3 / seconds(lambda: a @ b)


def logprob_speed() -> Iterator[Row]:
    tokens, vocab, hidden_size = (8192, 151936, 4096) if GPU else (512, 32768, 256)
    dtype, rate = torch.bfloat16 if GPU else torch.float32, matmul_rate()
    hidden = torch.randn(tokens, hidden_size, device=DEVICE).to(dtype).requires_grad_()
    weight = (torch.randn(vocab, hidden_size, device=DEVICE) * 0.02).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), device=DEVICE)
    product = 2 * tokens * vocab * hidden_size
    gradients_bytes = (tokens + vocab) * hidden_size * dtype.itemsize
    yield "shape", f"T={tokens} V={vocab} H={hidden_size} {dtype}", f"matrix products at {rate / 1e12:.1f} TFLOP/s"
    for block in (16, 32, 64, 128, 256, 512, 1024) if GPU else (4, 16, 64):
        for with_entropy in (False, True):

            def forward(block: int = block, with_entropy: bool = with_entropy):
                options = {"vocab_size": vocab, "with_entropy": with_entropy, "block_bytes": block << 20}
                return logprobs_and_entropy(hidden, weight, targets, **options)[0]

            def both(forward: Callable = forward):
                hidden.grad = weight.grad = None
                forward().sum().backward()

            with torch.no_grad():
                alone = seconds(forward, 3)
            whole, name = seconds(both, 3), f"block {block} MiB{', entropy' if with_entropy else ''}"
            yield f"{name}: forward", f"{alone * 1e3:.1f} ms", f"floor {product / rate * 1e3:.1f} ms (one product)"
            floor = 4 * product / rate * 1e3
            yield f"{name}: forward + backward", f"{whole * 1e3:.1f} ms", f"floor {floor:.1f} ms (four products)"
            if GPU:
                hidden.grad = weight.grad = None
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                both()
                peak = (torch.cuda.max_memory_allocated() - before) / 2**20
                yield f"{name}: peak memory", f"{peak:.0f} MiB", f"floor {gradients_bytes / 2**20:.0f} MiB (gradients)"


def logprob_memory() -> Iterator[Row]:
    setting = (
        ["--hidden", "1024", "--dtype", "bf16"] if GPU else ["--tokens", "1024", "--vocab", "32768", "--hidden", "128"]
    )
    command = [sys.executable, str(Path(__file__).parent / "bench" / "logprob_memory.py"), "--json", *setting]
    result = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
    for side in ("materialised", "fused"):
        yield side, f"{result[side]['bytes'] / 2**20:.0f} MiB", f"{result[side]['seconds'] * 1e3:.0f} ms"
    yield "ratio", f"{result['ratio']:.1f}x", ">= 10x is the goal at T=4096, V=151936"


def model_flops(config, lengths: list[int]) -> float:
    """Return the FLOPs of forward and backward: 6 per weight and token of a matrix product, and causal attention."""
    c, tokens = config, sum(lengths)
    attention = c.hidden_size * c.head_dim * (2 * c.num_attention_heads + 2 * c.num_key_value_heads)
    weights = c.num_hidden_layers * (attention + 3 * c.hidden_size * c.intermediate_size) + c.vocab_size * c.hidden_size
    scores = sum(n * n for n in lengths) * c.num_hidden_layers * c.num_attention_heads * c.head_dim
    return 6 * weights * tokens + 6 * scores  # scores: QK' and PV, half of each for causality


def ceilings() -> Iterator[Row]:
    """Yield the rates of a matrix product and of copies: on the device, to and from pinned host memory."""
    yield "matrix product", f"{matmul_rate() / 1e12:.2f} TFLOP/s", "bf16" if GPU else "fp32"
    size = (4 << 30) if GPU else (64 << 20)
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


def kernels() -> Iterator[Row]:
    """Yield what a step of a 600m model (without a GPU: 3m) spends its time on, the twelve largest kernels."""
    from torch.profiler import ProfilerActivity, profile

    size, count, length = ("600m", 16, 2048) if GPU else ("3m", 8, 256)
    config = qwen3(size)
    actor = actor_like(hf_model(config, "bf16"), "bf16" if GPU else "fp32", micro_batch_tokens=8192)
    ids = torch.randint(0, config.vocab_size, (count, length + 1), generator=torch.Generator().manual_seed(0))
    batch = Batch.of(ids[:, :1].tolist(), ids[:, 1:].tolist())
    for _ in range(2):  # the second one has been warmed up
        with profile(activities=[ProfilerActivity.CUDA if GPU else ProfilerActivity.CPU]) as trace:
            actor.step(batch, SFT(Options()).loss, counts(batch))
            wait()
    events = [(e.self_device_time_total if GPU else e.self_cpu_time_total, e) for e in trace.key_averages()]
    whole = sum(time for time, _ in events)
    for taken, event in sorted(events, key=lambda pair: -pair[0])[:12]:
        name = event.key.replace("|", " ")[:90]
        yield name, f"{taken / 1e3:.1f} ms", f"{event.count} calls, {taken / whole:.1%}"


def throughput(precision: str, size: str = "600m", layers: str = "transformer_engine") -> Iterator[Row]:
    if precision == "fp8":
        need_gpu((8, 9))
        need("transformer_engine")
    if layers == "torch":
        with torch_layers():
            yield from _throughput(precision, size)
    else:
        yield from _throughput(precision, size)


def _throughput(precision: str, size: str) -> Iterator[Row]:
    size, count, length = (size, 16, 2048) if GPU else ("3m", 8, 256)
    config = qwen3(size)
    actor = actor_like(hf_model(config, precision), precision, micro_batch_tokens=8192)
    ids = torch.randint(0, config.vocab_size, (count, length + 1), generator=torch.Generator().manual_seed(0))
    batch = Batch.of(ids[:, :1].tolist(), ids[:, 1:].tolist())
    step = seconds(lambda: actor.step(batch, SFT(Options()).loss, counts(batch)), 5)
    rate = model_flops(config, [length] * count) / step
    yield "model", f"Qwen3-shaped {size}, {count} x {length} tokens, {precision}", "AdamW step included"
    yield "tokens per second", f"{count * length / step:,.0f}", f"{step * 1e3:.0f} ms a step"
    yield "of the measured matrix-product rate", f"{rate / matmul_rate():.1%}", f"{rate / 1e12:.2f} TFLOP/s"
    name = torch.cuda.get_device_name() if GPU else ""
    peak = next((peak for key, peak in DATA_SHEET.items() if key in name), None)
    if peak:
        yield "MFU", f"{rate / (peak * 1e12):.1%}", f"data sheet: {peak} TFLOP/s dense bf16"
    if GPU:
        yield "peak memory", f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", ""


def with_transformer_engine(precision: str, size: str) -> Iterator[Row]:
    need_gpu((8, 9) if precision == "fp8" else (0, 0))
    need("transformer_engine")
    yield from throughput(precision, size)


BF16 = "bf16" if GPU else "fp32"
# In the order in which the first person with a GPU should see them.
PARTS: dict[str, Callable[[], Iterator[Row]]] = {
    "versions": versions,
    "ceilings": ceilings,
    "log-probs against float64": logprob_accuracy,
    "fp32, torch layers, against the CPU": lambda: parity("fp32", "torch"),
    "bf16, torch layers, against the CPU in fp32": lambda: parity("bf16", "torch"),
    "fp32, Transformer Engine layers, against the CPU": lambda: parity("fp32", "transformer_engine"),
    "bf16, Transformer Engine layers, against the CPU in fp32": lambda: parity("bf16", "transformer_engine"),
    "fp8, Transformer Engine layers, against the CPU in fp32": lambda: parity("fp8", "transformer_engine"),
    **VLLM,
    **EXPERTS,
    "bf16 training": lambda: training("bf16"),
    "fp8 training": lambda: training("fp8"),
    **TRANSPORT,
    "log-probs: time and memory beside the floor": logprob_speed,
    "log-probs: memory beside materialised logits": logprob_memory,
    "bf16 throughput (fp32 without a GPU)": lambda: throughput(BF16),
    "fp8 throughput": lambda: throughput("fp8"),
    "torch layers, throughput, 600m": lambda: throughput(BF16, "600m", "torch"),
    "torch layers, throughput, 1.7b": lambda: need_gpu() or throughput(BF16, "1.7b", "torch"),
    **{
        f"{precision}, Transformer Engine, throughput, {size}": functools.partial(
            with_transformer_engine, precision, size
        )
        for size in ("4b", "8b_12")
        for precision in ("bf16", "fp8")
    },
    "kernels of a step": kernels,
    **DECODING,
}


def run(part: Callable[[], Iterator[Row]]) -> dict:
    rows: list[Row] = []
    begin = time.perf_counter()
    try:
        for row in part():
            rows.append(row)
            print(f"| | {' | '.join(row)} |", flush=True)  # of a part that is killed this is all
        status = "passed"
    except NotRun as reason:
        status = f"not run: {reason}"
    except Exception as error:  # one broken part must not hide the others
        traceback.print_exc()
        status = f"FAILED: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    gc.collect()  # models have cycles
    if GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return {"status": status, "seconds": round(time.perf_counter() - begin, 2), "rows": rows}


def table(results: dict[str, dict]) -> str:
    lines = ["# GPU checks", "", "| part | what | found | beside |", "| --- | --- | --- | --- |"]
    for name, result in results.items():
        lines.append(f"| **{name}** | **{result['status']}** | {result['seconds']:.1f} s | |")
        lines += [f"| | {what} | {found} | {beside} |" for what, found, beside in result["rows"]]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="What only a GPU can show; see gpu_checks.sh.")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_checks"), help="folder of the JSON and the table")
    parser.add_argument("--only", nargs="+", help="run the parts whose name has one of these in it")
    parser.add_argument("--write-reference", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    if args.write_reference:
        save_file(gradients("fp32"), args.write_reference)
        parallel.shutdown()
        return
    for only in args.only or ():
        if not any(only in name for name in PARTS):
            parser.error(f"--only {only}: no part has this in its name; the parts are {', '.join(PARTS)}")
    results = {}
    for name, part in PARTS.items():
        if args.only is None or any(only in name for only in args.only):
            results[name] = run(part)
            print(f"{name}: {results[name]['status']} ({results[name]['seconds']:.1f} s)", flush=True)
    if torch.distributed.is_initialized():
        parallel.shutdown()
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "gpu_checks.json").write_text(json.dumps(results, indent=1))
    (args.out / "gpu_checks.md").write_text(table(results))
    sys.exit(any(result["status"].startswith("FAILED") for result in results.values()))


if __name__ == "__main__":
    main()
