"""Measures peak memory and time of FPA's two log-probs against materialised logits, and of FPA's step against Off-RL's.

    python tools/bench/extrapolated_logprob.py [--tokens 4096] [--vocab 151936] [--hidden 1024]

All sides take hidden states of the policy and of the reference and their output matrices, run forward and backward, and
are measured each in a fresh process (see sides.py for what the bytes are). On a CPU the seconds are CPU time:
others on the machine then disturb less.

    materialised   h and h_ref as [T, V], log_softmax of h and of (1 + lambda) h - lambda h_ref, gather
    fused          megatron_rft's walk over the vocabulary
    off_rl         the fused log-prob of the policy alone: what FPA's costs more than is the extrapolation
"""

import argparse
import json
import time

import sides

SIDES = ("materialised", "fused", "off_rl")
SMALLEST = "--tokens 2048 --vocab 8192 --hidden 64"  # tests/bench
LAMBDA = 2.0


def materialised(hidden, weight, other_hidden, other_weight, targets, args):
    import torch

    logits = hidden @ weight.t()
    column = targets.unsqueeze(1)
    with torch.no_grad():
        ahead = (1 + LAMBDA) * logits.float() - LAMBDA * (other_hidden @ other_weight.t()).float()
        extrapolated = ahead.log_softmax(-1).gather(1, column).squeeze(1)
        del ahead
    return logits.float().log_softmax(-1).gather(1, column).squeeze(1), extrapolated


def fused(hidden, weight, other_hidden, other_weight, targets, args):
    from megatron_rft.megatron.two_distributions import compare

    found = compare(
        hidden,
        weight,
        other_hidden,
        other_weight,
        targets,
        names=frozenset({"logprobs", "extrapolated_logprobs"}),
        vocab_size=len(weight),
        extrapolation=LAMBDA,
        block_bytes=args.block_mib << 20,
    )
    return found["logprobs"], found["extrapolated_logprobs"]


def off_rl(hidden, weight, other_hidden, other_weight, targets, args):
    from megatron_rft.megatron.vocabulary import logprobs_and_entropy

    options = {"vocab_size": len(weight), "with_entropy": False, "block_bytes": args.block_mib << 20}
    logprobs, _ = logprobs_and_entropy(hidden, weight, targets, **options)
    return logprobs, logprobs.detach()


def measure(args: argparse.Namespace) -> dict:
    """Measure one side in this process."""
    import torch

    device, dtype = sides.device_and_dtype(args)
    side, peak = globals()[args.side], sides.Peak(device)
    clock = time.perf_counter if device == "cuda" else time.process_time

    def once(tokens: int, vocab: int) -> dict:
        def pair():
            hidden = torch.randn(tokens, args.hidden, device=device).to(dtype)
            return hidden, torch.randn(vocab, args.hidden, device=device).mul_(0.05).to(dtype)

        (hidden, weight), other = pair(), pair()
        hidden.requires_grad_(), weight.requires_grad_()
        targets = torch.randint(0, vocab, (tokens,), device=device)
        peak.start()
        begin = clock()
        logprobs, extrapolated = side(hidden, weight, *other, targets, args)
        (extrapolated.exp().detach() * logprobs).mean().backward()
        high = peak.stop()  # waits for the device
        return {
            "seconds": clock() - begin,
            "bytes": high,
            "logprob": logprobs.mean().item(),
            "extrapolated": extrapolated.mean().item(),
        }

    return sides.warm(once, args, device)


def main() -> None:
    args = sides.parser(__doc__.splitlines()[0], SIDES, hidden=1024).parse_args()
    if args.side:
        print(json.dumps(measure(args)))
        return
    result = sides.each(SIDES)
    result["setting"] = sides.setting(args)
    if args.json:
        print(json.dumps(result))
        return
    print(f"T={args.tokens} V={args.vocab} H={args.hidden} {args.dtype}, {result['fused']['device']}")
    print("| side | peak MiB | seconds | mean log pi | mean log pi_hat |\n| --- | --- | --- | --- | --- |")
    for side in SIDES:
        row = result[side]
        ahead = "" if side == "off_rl" else f"{row['extrapolated']:.5f}"
        print(f"| {side} | {row['bytes'] / 2**20:,.0f} | {row['seconds']:.2f} | {row['logprob']:.5f} | {ahead} |")
    wide, ours, alone = (result[side] for side in SIDES)
    print(
        f"materialised / fused = {wide['bytes'] / ours['bytes']:.1f}x memory; "
        f"fused / materialised = {ours['seconds'] / wide['seconds']:.2f}x time; "
        f"fused / off_rl = {ours['seconds'] / alone['seconds']:.2f}x time"
    )


if __name__ == "__main__":
    main()
