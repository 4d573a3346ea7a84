"""Measures peak memory and time of the fused log-probs against materialised logits, each in a fresh process.

    python tools/bench/logprob_memory.py [--tokens 4096] [--vocab 151936] [--hidden 256] [--entropy]

Both sides run forward and backward. The materialised one is what is usually written: `.float().log_softmax(-1)`,
gather. Memory is the peak over what was there before the call (resident set on a CPU, the allocator's peak on a GPU)
and includes both gradients. The floor is what any method must return: the gradients of hidden states and weight, and
two numbers per token.
"""

import argparse
import json
import time

import sides

SIDES = ("materialised", "fused")
SMALLEST = "--tokens 2048 --vocab 8192 --hidden 64"  # tests/bench


def materialised(hidden, weight, targets, args):
    logprobs = (hidden @ weight.t()).float().log_softmax(-1)
    if args.entropy:
        detached = logprobs.detach()
        -(detached.exp() * detached).sum(-1)
    return logprobs.gather(1, targets.unsqueeze(1)).squeeze(1)


def fused(hidden, weight, targets, args):
    from megatron_rft.megatron.vocabulary import logprobs_and_entropy

    options = {"vocab_size": len(weight), "with_entropy": args.entropy, "block_bytes": args.block_mib << 20}
    return logprobs_and_entropy(hidden, weight, targets, **options)[0]


def measure(args: argparse.Namespace) -> dict:
    """Measure one side in this process."""
    import torch

    device, dtype = sides.device_and_dtype(args)
    side, peak = globals()[args.side], sides.Peak(device)

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

    return sides.warm(once, args, device)


def main() -> None:
    parser = sides.parser(__doc__.splitlines()[0], SIDES, hidden=256)
    parser.add_argument("--entropy", action="store_true", help="both sides also give the entropy (without gradient)")
    args = parser.parse_args()
    if args.side:
        print(json.dumps(measure(args)))
        return
    result = sides.each(SIDES)
    itemsize = 4 if args.dtype == "fp32" else 2
    result["floor_bytes"] = (args.tokens + args.vocab) * args.hidden * itemsize + 8 * args.tokens
    result["ratio"] = result["materialised"]["bytes"] / result["fused"]["bytes"]
    result["setting"] = sides.setting(args)
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
