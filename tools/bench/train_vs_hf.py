"""Compares a training step of our Actor with Hugging Face transformers: forward, backward, clipping and AdamW.

    python tools/bench/train_vs_hf.py [--sizes 1m 3m 20m] [--steps 10] [--threads 1] [--precision fp32]

Same architecture and weights, same tokens, same threads. The steps of both sides alternate in one process, so that
other load on the machine meets both alike. Ratios above 1 mean that ours is faster. "min" compares the fastest steps,
"median" the usual ones, "cpu" the least processor time.
"""

import argparse
import json
import statistics
import time

import torch
import torch.nn.functional as F
from setups import ADAMW, SIZES, actor_like, hf_model, qwen3, set_threads

from megatron_rft.config.algorithms.sft import SFT as Options
from megatron_rft.megatron import parallel
from megatron_rft.objectives.base import counts
from megatron_rft.objectives.sft import SFT
from megatron_rft.records import Batch

SMALLEST = "--sizes 1m --sequences 2 --length 16 --steps 1"  # tests/bench


def hf_step(model, ids):
    """ids [b, S + 1]"""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    norms = [p for p in model.parameters() if p.ndim == 1]  # without decay, as in Megatron
    groups = [{"params": matrices, "weight_decay": ADAMW["weight_decay"]}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=ADAMW["lr"])
    inputs, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def step() -> float:
        optimizer.zero_grad()
        logits = model(inputs, use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), ADAMW["clip_grad"])
        optimizer.step()
        return loss.item()

    return step


def our_step(actor, ids):
    batch = Batch.of(ids[:, :1].tolist(), ids[:, 1:].tolist())
    objective, count = SFT(Options()), counts(batch)
    return lambda: actor.step(batch, objective.loss, count)["loss"]


def compare(size: str, args: argparse.Namespace) -> dict:
    config = qwen3(size)
    model = hf_model(config, args.precision)
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
    for kind, function, series in (("min", min, wall), ("median", statistics.median, wall), ("cpu", min, cpu)):
        values = {name: function(series[name]) for name in steps}
        row[kind] = {**values, "ratio": values["transformers"] / values["megatron_rft"]}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["1m", "3m", "20m"])
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--padded", action="store_true", help="ours as a rectangle instead of packed")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    set_threads(args.threads)
    rows = [compare(size, args) for size in args.sizes]
    parallel.shutdown()
    if args.json:
        print(json.dumps(rows))
        return
    print(
        f"{args.precision}, {args.sequences} x {args.length} tokens, {args.threads} thread(s), {args.steps} steps each"
    )
    print(
        "| parameters | transformers ms (min) | megatron-rft ms (min) | ours x: min | median | cpu | loss difference |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        low = row["min"]
        print(
            f"| {row['parameters'] / 1e6:.1f} M | {low['transformers'] * 1e3:.0f} | {low['megatron_rft'] * 1e3:.0f} "
            f"| {low['ratio']:.2f} | {row['median']['ratio']:.2f} | {row['cpu']['ratio']:.2f} "
            f"| {row['largest_loss_difference']:.1e} |"
        )


if __name__ == "__main__":
    main()
