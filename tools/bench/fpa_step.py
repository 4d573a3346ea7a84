"""Compares FPA's optimizer step with Off-RL's on the same batch: how much longer it takes, and why.

    python tools/bench/fpa_step.py [--size 1m] [--vocab 151936] [--sequences 16] [--rounds 5]

Interleaved, in one process: Off-RL; FPA on cached hidden states of the reference; FPA with a second forward pass. The
reference's hidden states are read from a cache on disk, as a run reads them, and that reading is timed by itself too.
On a CPU it is this process's CPU time that counts, so that others on the machine disturb less.
"""

import argparse
import tempfile
from pathlib import Path
from statistics import median

import torch
from setups import SIZES, actor_like, hf_model, qwen3, seconds, set_threads

from megatron_rft import objectives
from megatron_rft.config.algorithms.offline import FPA, OffRL
from megatron_rft.data.hidden_states import HiddenCache, write
from megatron_rft.megatron import model as models
from megatron_rft.megatron.actor import Actor
from megatron_rft.megatron.two_distributions import Second
from megatron_rft.records import Batch

SMALLEST = "--size 1m --vocab 64 --sequences 2 --prompt 4 --response 8 --rounds 1"  # tests/bench


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="1m")
    parser.add_argument("--vocab", type=int, help="instead of the size's")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--response", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def batch_of(args: argparse.Namespace, vocab: int) -> Batch:
    draw = torch.randint(0, vocab, (args.sequences, args.prompt + args.response)).tolist()
    prompts, responses = [ids[: args.prompt] for ids in draw], [ids[args.prompt :] for ids in draw]
    rewards = torch.tensor([1.0, -1.0]).repeat(args.sequences)[: args.sequences]
    batch = Batch.of(prompts, responses, sequences={"rewards": rewards})
    return batch.with_tokens(ref_logprobs=torch.zeros(len(batch.response_ids)))


def cache_of(actor: Actor, batch: Batch, folder: Path) -> tuple[HiddenCache, torch.Tensor]:
    """The reference's hidden states on disk, and its output matrix."""
    write(folder, 0, actor.hidden_states(batch))
    return HiddenCache(folder), models.output_weight(actor.models[-1]).detach().clone()


def main() -> None:
    args = parse()
    set_threads(args.threads)
    config = qwen3(args.size, **({"vocab_size": args.vocab} if args.vocab else {}))
    tokens = args.sequences * (args.prompt + args.response)
    actor = actor_like(hf_model(config, args.precision), args.precision, micro_batch_tokens=tokens)
    batch = batch_of(args, config.vocab_size)
    reference = actor.snapshot()
    with tempfile.TemporaryDirectory() as folder:
        cache, weight = cache_of(actor, batch, Path(folder))
        second = {
            "Off-RL": None,
            "FPA, cached": Second(batch, extrapolation=1.0, rows=cache.rows, output_weight=weight),
            "FPA, recomputed": Second(batch, reference, 1.0),
        }

        def step(name: str) -> None:
            (update,) = objectives.build(OffRL() if name == "Off-RL" else FPA()).prepare(batch, {}).updates
            actor.step(batch, update.loss, update.counts(batch), update.outputs, second=second[name])

        def read() -> None:
            cache.rows(torch.arange(len(batch.response_ids)))

        actions = {name: (lambda name=name: step(name)) for name in second} | {"reading the cache": read}
        times: dict[str, list[float]] = {name: [] for name in actions}
        for _ in range(args.rounds + 1):
            for name, action in actions.items():
                times[name].append(seconds(action))
    print(f"{args.size}, vocabulary {config.vocab_size}, {tokens} tokens, {args.precision}, {actor.device.type}")
    times = {name: taken[1:] for name, taken in times.items()}  # the first round warms up
    base = median(times["Off-RL"])
    print("| | seconds (median) | over Off-RL |\n| --- | --- | --- |")
    for name, found in times.items():
        over = f"{100 * (median(found) / base - (name != 'reading the cache')):+.1f}%" if name != "Off-RL" else ""
        print(f"| {name} | {median(found):.4f} | {over} |")


if __name__ == "__main__":
    main()
