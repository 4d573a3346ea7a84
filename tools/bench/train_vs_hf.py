"""Compares a training step of our Actor with Hugging Face transformers: forward, backward, clipping and AdamW.

    python tools/bench/train_vs_hf.py [--sizes 1m 3m 20m | --model FOLDER] [--steps 10] [--threads 1] [--precision fp32]

Same architecture and weights, same tokens, same threads. In bf16 both sides keep fp32 main parameters: transformers'
gradients are copied to them, and they to its weights. The steps of both sides alternate in one process, so that other
load on the machine meets both alike. Ratios above 1 mean that ours is faster. "min" compares the fastest steps,
"median" the usual ones, "cpu" the least processor time. "products" is the processor time of a step's matrix products
alone, the floor of both sides.
"""

import argparse
import json
import statistics
import time
from collections import Counter

import torch
import torch.nn.functional as F
from setups import ADAMW, DTYPES, SIZES, actor_like, fastest, hf_model, qwen3, set_threads, update_of
from transformers import AutoModelForCausalLM

from megatron_rft.megatron import parallel
from megatron_rft.records import Batch

SMALLEST = "--sizes 1m --sequences 2 --length 16 --steps 1"  # tests/bench


def hf_step(model, ids):
    """ids [b, S + 1]"""
    weights = list(model.parameters())
    mixed = weights[0].dtype != torch.float32
    mains = [p.detach().float().requires_grad_() for p in weights] if mixed else weights
    matrices = [p for p in mains if p.ndim > 1]
    norms = [p for p in mains if p.ndim == 1]  # without decay, as in Megatron
    groups = [{"params": matrices, "weight_decay": ADAMW["weight_decay"]}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=ADAMW["lr"], fused=True)
    inputs, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def step() -> float:
        model.zero_grad()
        logits = model(inputs, use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        loss.backward()
        if mixed:
            for main, weight in zip(mains, weights, strict=True):
                main.grad, weight.grad = weight.grad.float(), None
        torch.nn.utils.clip_grad_norm_(mains, ADAMW["clip_grad"])
        optimizer.step()
        if mixed:
            torch._foreach_copy_([weight.detach() for weight in weights], mains)
            optimizer.zero_grad()
        return loss.item()

    return step


def our_step(actor, ids):
    update = update_of(Batch.of(ids[:, :1].tolist(), ids[:, 1:].tolist()))
    return lambda: actor.step(*update)["loss"]


def products(model, tokens: int) -> float:
    """Seconds of the matrix products of a step: each matrix forward, for its input's and for its own gradient."""
    matrices = [m.weight.detach() for m in model.modules() if isinstance(m, torch.nn.Linear)]
    shapes = Counter(tuple(m.shape) for m in matrices)
    return sum(count * _product(tokens, *shape, matrices[0].dtype) for shape, count in shapes.items())


def _product(tokens: int, rows: int, columns: int, dtype: torch.dtype) -> float:
    x, weight, grad = (torch.randn(shape).to(dtype) for shape in ((tokens, columns), (rows, columns), (tokens, rows)))
    return fastest(lambda: (x @ weight.t(), grad @ weight, grad.t() @ x))[0]


def compare(size: str | None, args: argparse.Namespace) -> dict:
    """Of a size, or of the model in a folder."""
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=DTYPES[args.precision])
    else:
        model = hf_model(qwen3(size), args.precision)
    config = model.config
    ids = torch.randint(
        0, config.vocab_size, (args.sequences, args.length + 1), generator=torch.Generator().manual_seed(0)
    )
    tokens = args.sequences * args.length
    actor = actor_like(model, args.precision, micro_batch_tokens=tokens, pack_sequences=not args.padded)
    steps = {"transformers": hf_step(model.train(), ids), "megatron_rft": our_step(actor, ids)}
    wall, cpu, losses = ({name: [] for name in steps} for _ in range(3))
    for number in range(args.steps + 2):
        for name, step in steps.items():
            begin, begin_cpu = time.perf_counter(), time.process_time()
            loss = step()
            if number >= 2:
                wall[name].append(time.perf_counter() - begin)
                cpu[name].append(time.process_time() - begin_cpu)
            losses[name].append(loss)
    theirs, ours = losses.values()
    drift = max(abs(a - b) for a, b in zip(theirs, ours, strict=True))
    assert args.precision != "fp32" or drift < 1e-3, f"the two sides do not train the same model: {theirs} {ours}"
    row = {"size": size, "parameters": model.num_parameters(), "tokens": tokens, "largest_loss_difference": drift}
    row["products"] = products(model, tokens)
    for kind, function, series in (("min", min, wall), ("median", statistics.median, wall), ("cpu", min, cpu)):
        values = {name: function(series[name]) for name in steps}
        row[kind] = {**values, "ratio": values["transformers"] / values["megatron_rft"]}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["1m", "3m", "20m"])
    parser.add_argument("--model", help="a folder in Hugging Face format, in the place of --sizes")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--padded", action="store_true", help="ours as a rectangle instead of packed")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    set_threads(args.threads)
    rows = [compare(size, args) for size in ([None] if args.model else args.sizes)]
    parallel.shutdown()
    if args.json:
        print(json.dumps(rows))
        return
    print(
        f"{args.precision}, {args.sequences} x {args.length} tokens, {args.threads} thread(s), {args.steps} steps each"
    )
    print(
        "| parameters | transformers ms (min) | megatron-rft ms (min) | ours x: min | median | cpu | loss difference "
        "| processor ms: transformers | megatron-rft | products |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        low, cpu = row["min"], row["cpu"]
        print(
            f"| {row['parameters'] / 1e6:.1f} M | {low['transformers'] * 1e3:.0f} | {low['megatron_rft'] * 1e3:.0f} "
            f"| {low['ratio']:.2f} | {row['median']['ratio']:.2f} | {cpu['ratio']:.2f} "
            f"| {row['largest_loss_difference']:.1e} "
            f"| {cpu['transformers'] * 1e3:.0f} | {cpu['megatron_rft'] * 1e3:.0f} | {row['products'] * 1e3:.0f} |"
        )


if __name__ == "__main__":
    main()
