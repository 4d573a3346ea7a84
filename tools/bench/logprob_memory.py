"""Peak memory and time of the fused log-prob path beside materialised logits, each in a fresh process.

    python tools/bench/logprob_memory.py [--tokens 4096] [--vocab 151936] [--hidden 256] [--entropy]

Both sides run forward and backward. The materialised one is what is usually written: `.float().log_softmax(-1)`,
gather. Memory is the peak over what was there before the call (resident set on a CPU, the allocator's peak on a GPU)
and includes both gradients. The floor is what any method must return: the gradients of hidden states and weight, and
two numbers per token.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

SIDES = ("materialised", "fused")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--block-mib", type=int, default=64)
    parser.add_argument("--entropy", action="store_true", help="both sides also give the entropy (without gradient)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    return parser.parse_args()


def materialised(hidden, weight, targets, args):
    logprobs = (hidden @ weight.t()).float().log_softmax(-1)
    if args.entropy:
        detached = logprobs.detach()
        -(detached.exp() * detached).sum(-1)
    return logprobs.gather(1, targets.unsqueeze(1)).squeeze(1)


def fused(hidden, weight, targets, args):
    from megatron_rft.megatron.logprobs import logprobs_and_entropy

    options = {"vocab_size": len(weight), "with_entropy": args.entropy, "block_bytes": args.block_mib << 20}
    return logprobs_and_entropy(hidden, weight, targets, **options)[0]


class Peak:
    """Bytes in use at most since `start`, beyond those in use then."""

    def __init__(self, device: str):
        self.device = device

    def start(self):
        import torch

        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
            self.before = self.resident("VmRSS")

    def stop(self) -> int:
        import torch

        return (torch.cuda.max_memory_allocated() if self.device == "cuda" else self.resident("VmHWM")) - self.before

    @staticmethod
    def resident(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def measure(args: argparse.Namespace) -> dict:
    """One side, in this process."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[args.dtype]
    torch.manual_seed(0)
    side, peak = globals()[args.side], Peak(device)

    def once(tokens: int, vocab: int) -> dict:
        hidden = torch.randn(tokens, args.hidden, device=device).to(dtype).requires_grad_()
        weight = torch.randn(vocab, args.hidden, device=device).mul_(0.05).to(dtype).requires_grad_()
        targets = torch.randint(0, vocab, (tokens,), device=device)
        peak.start()
        begin = time.perf_counter()
        logprobs = side(hidden, weight, targets, args)
        logprobs.mean().backward()
        high = peak.stop()  # waits for the device
        return {"seconds": time.perf_counter() - begin, "bytes": high, "mean_logprob": logprobs.mean().item()}

    once(64, 256)  # libraries load and threads start before anything is measured
    if device == "cuda":
        once(args.tokens, args.vocab)
    return once(args.tokens, args.vocab) | {"device": torch.cuda.get_device_name() if device == "cuda" else "cpu"}


def main() -> None:
    args = parse()
    if args.side:
        print(json.dumps(measure(args)))
        return
    result = {}
    for side in SIDES:
        run = subprocess.run([sys.executable, *sys.argv, "--side", side], capture_output=True, text=True)
        if run.returncode != 0:
            sys.exit(f"the {side} side failed:\n{run.stderr[-2000:]}")
        result[side] = json.loads(run.stdout.splitlines()[-1])
    itemsize = 4 if args.dtype == "fp32" else 2
    result["floor_bytes"] = (args.tokens + args.vocab) * args.hidden * itemsize + 8 * args.tokens
    result["ratio"] = result["materialised"]["bytes"] / result["fused"]["bytes"]
    result["setting"] = {k: v for k, v in vars(args).items() if k not in ("json", "side")}
    if args.json:
        print(json.dumps(result))
        return
    print(f"T={args.tokens} V={args.vocab} H={args.hidden} {args.dtype}, {result['fused']['device']}")
    print("| side | peak MiB | seconds | mean log-prob |\n| --- | --- | --- | --- |")
    for side in SIDES:
        row = result[side]
        print(f"| {side} | {row['bytes'] / 2**20:,.0f} | {row['seconds']:.2f} | {row['mean_logprob']:.6f} |")
    print(f"| floor (gradients) | {result['floor_bytes'] / 2**20:,.0f} | | |")
    print(
        f"materialised / fused = {result['ratio']:.1f}x memory, "
        f"{result['materialised']['seconds'] / result['fused']['seconds']:.2f}x time"
    )


if __name__ == "__main__":
    main()
