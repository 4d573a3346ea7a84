"""Measures log-probs and training steps with and without shared prompts, and the ratio of their arithmetic.

    python tools/bench/shared_prompts.py [--size 20m] [--steps 5] [--threads 1] [--precision fp32] [--shapes 1024x8x128]

A shape is prompt x group x response, in tokens. Both sides have the same weights and sequences and alternate in one
process; the fastest step of each counts, in processor time (on a GPU by the clock). "arithmetic" divides the
floating-point operations of one side by the other's: layers and attention (causal, half of the square) of the tokens
that are computed, and the output matrix of the response tokens, which does not change. "memory" divides the bytes that
a training step keeps for its backward pass, weights among them. `--picture FILE` draws the gain over the lengths of
prompt and response.
"""

import argparse
import dataclasses
import json

import torch
from setups import SIZES, actor_like, hf_model, qwen3, seconds, set_threads, update_of

from megatron_rft.megatron import parallel
from megatron_rft.records import Batch

SMALLEST = "--size 1m --shapes 8x2x4 --tokens 32 --steps 1"  # tests/bench
SHAPES = ("1024x8x128", "48x8x20", "64x8x4096")
LOGPROBS = frozenset({"logprobs"})


def batch_of(prompt: int, group: int, response: int, vocabulary: int, tokens: int) -> Batch:
    """Create as many whole groups as fit into `tokens` without sharing, at least one."""
    generator = torch.Generator().manual_seed(0)
    groups = max(1, tokens // (group * (prompt + response)))

    def ids(length: int) -> list[int]:
        return torch.randint(0, vocabulary, (length,), generator=generator).tolist()

    prompts = [ids(prompt) for _ in range(groups)]
    return Batch.of(
        [prompts[number] for number in range(groups) for _ in range(group)],
        [ids(response) for _ in range(groups * group)],
    )


def operations(size: str, prompt: int, group: int, response: int, shared: bool) -> float:
    """Return the FLOPs of the forward pass of one group; a multiplication in a matrix product counts twice."""
    vocabulary, hidden, layers, feed_forward, heads, kv_heads, head_dim = SIZES[size]
    weights = hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * feed_forward
    pairs = group * ((prompt + response) ** 2 / 2 if not shared else prompt * response + response**2 / 2)
    tokens = group * ((0 if shared else prompt) + response)
    if shared:
        pairs, tokens = pairs + prompt**2 / 2, tokens + prompt
    return layers * (2 * weights * tokens + 4 * heads * head_dim * pairs) + 2 * vocabulary * hidden * group * response


def kept_bytes(function) -> int:
    """Return the bytes that `function` keeps for its backward passes; each block of memory counts once."""
    blocks: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        blocks[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        function()
    return sum(blocks.values())


def measure(size: str, shape: str, args: argparse.Namespace) -> dict:
    prompt, group, response = map(int, shape.split("x"))
    config = qwen3(size)
    batch = batch_of(prompt, group, response, config.vocab_size, args.tokens)
    actor = actor_like(hf_model(config, args.precision), args.precision, micro_batch_tokens=int(batch.lengths.sum()))
    layouts = {side: dataclasses.replace(actor.layout, share_prompts=side == "shared") for side in ("apart", "shared")}
    update = update_of(batch)
    work = {"logprobs": lambda: actor.outputs(batch, LOGPROBS), "training": lambda: actor.step(*update)}
    row = {"shape": shape, "groups": len(batch) // group}
    row["arithmetic"] = operations(size, prompt, group, response, False) / operations(
        size, prompt, group, response, True
    )
    for name, function in work.items():
        times = {side: [] for side in layouts}
        for _ in range(args.steps + 1):
            for side, actor.layout in layouts.items():
                times[side].append(seconds(function))
        row[name] = {side: min(found[1:]) for side, found in times.items()}
    row["memory"] = {side: kept_bytes(work["training"]) for side, actor.layout in layouts.items()}
    return row


def draw(rows: list[dict], args: argparse.Namespace) -> None:
    """Write a chart with a line for each length of a response: measured, and dashed by arithmetic."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    lengths = {row["shape"]: tuple(map(int, row["shape"].split("x"))) for row in rows}
    for number, response in enumerate(sorted({length[2] for length in lengths.values()})):
        line = sorted((row for row in rows if lengths[row["shape"]][2] == response), key=lambda r: lengths[r["shape"]])
        prompts = [lengths[row["shape"]][0] for row in line]
        for part, work in zip(axes, ("logprobs", "training"), strict=True):
            gains = [row[work]["apart"] / row[work]["shared"] for row in line]
            part.plot(prompts, gains, "o-", color=f"C{number}", label=f"{response} tokens a response")
            part.plot(prompts, [row["arithmetic"] for row in line], "--", color=f"C{number}", linewidth=0.8)
    for part, title in zip(axes, ("log-probs", "a training step"), strict=True):
        part.set(xscale="log", xlabel="tokens of the prompt", title=f"{title}: times faster with shared prompts")
        part.set_xticks(sorted({length[0] for length in lengths.values()}), minor=False)
        part.xaxis.set_major_formatter("{x:.0f}")
        part.axhline(1, color="grey", linewidth=0.5)
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(args.picture, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="20m")
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--tokens", type=int, default=10_000, help="about that many without sharing")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--picture", help="a file for a drawing of the rows")
    args = parser.parse_args()
    set_threads(args.threads)
    rows = [measure(args.size, shape, args) for shape in args.shapes]
    parallel.shutdown()
    if args.picture:
        draw(rows, args)
    if args.json:
        print(json.dumps(rows))
        return
    print(f"{args.size}, {args.precision}, {args.threads} thread(s), {args.steps} steps each")
    print("| prompt x group x response | groups | arithmetic | log-probs | ms | training | ms | memory |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        cells = [row["shape"], str(row["groups"]), f"{row['arithmetic']:.2f} x"]
        for name in ("logprobs", "training"):
            apart, shared = row[name]["apart"], row[name]["shared"]
            cells += [f"{apart / shared:.2f} x", f"{apart * 1e3:.0f} -> {shared * 1e3:.0f}"]
        cells.append(f"{row['memory']['apart'] / row['memory']['shared']:.1f} x")
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
