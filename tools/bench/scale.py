"""What one rank does in a step that grows with the number of ranks: real code, fake peers, on one machine.

    python tools/bench/scale.py [--ranks 64 256 1024 4096] [--responses 8] [--tokens 1000]

Each rank has `--responses` responses of `--tokens` tokens, so the batch grows with the ranks. A row has the processor
seconds and bytes of one rank for each number of ranks, and the exponent of their growth between the first and the last
number (1: as the batch; 0: constant). The peers' parcels are copies of this rank's: reading them costs the same.
"""

import argparse
import json
import math
import pickle
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from megatron_rft.launching.job import Job
from megatron_rft.launching.slurm import Node
from megatron_rft.megatron import balance, optimizer_shards
from megatron_rft.records import Batch, Prompt, Response, Score
from megatron_rft.rollout.sampler import ScoredResponse, packed, to_batch

SMALLEST = "--ranks 2 4 --responses 2 --tokens 8"
RANKS_OF_REPLICA = 4  # ranks that share a data-parallel share
BUDGET = 18432  # tokens of a micro-batch
PIECES = 400  # ranges of parameters that a rank writes into a checkpoint


def measured(action: Callable[[], object]) -> tuple[float, object]:
    begin = time.process_time()
    found = action()
    return time.process_time() - begin, found


def rollouts(count: int, tokens: int, first: int) -> list[ScoredResponse]:
    generator = np.random.default_rng(first)
    ids = generator.integers(0, 150_000, (count, tokens)).tolist()
    prompt = Prompt(first, tuple(range(100)), "a problem", "4")
    responses = [Response(tuple(row), tuple([-0.5] * tokens), "stop", 1) for row in ids]
    return [ScoredResponse(first, i, prompt, each, "", Score(1.0)) for i, each in enumerate(responses)]


def receive(sent: bytes, ranks: int, prompts: dict[int, Prompt]) -> None:
    """Read the parcels of all ranks and build the batch, as every rank does once a round."""
    found = [replace(each, prompt=prompts[each.prompt_index]) for _ in range(ranks) for each in pickle.loads(sent)]
    to_batch(found)


def batch_of(ranks: int, responses: int, tokens: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    lens = torch.randint(tokens // 2, tokens * 3 // 2, (ranks * responses,), generator=generator)
    prompt_lens = torch.full_like(lens, 100)
    return Batch(
        torch.zeros(int(prompt_lens.sum()), dtype=torch.long), prompt_lens, lens.new_zeros(int(lens.sum())), lens
    )


def pack_plan(shares: list[list[torch.Tensor]]) -> bytes:
    """Return what rank 0 would have to send if the other ranks did not plan themselves."""
    cuts = [cut for share in shares for cut in share]
    return pickle.dumps((len(shares), [len(cut) for cut in cuts], torch.cat(cuts).numpy()))


def read_plan(sent: bytes) -> list[list[torch.Tensor]]:
    count, sizes, positions = pickle.loads(sent)
    cuts, each = torch.from_numpy(positions).split(sizes), len(sizes) // count
    return [list(cuts[rank * each : (rank + 1) * each]) for rank in range(count)]


def look(folder: Path, nodes: int) -> None:
    Job(folder, folder, Node(0, nodes)).failed_elsewhere()


def index(ranks: int) -> list:
    pieces = ranks * PIECES
    one = {"set": "actor.own", "key": "decoder.layers.mlp.weight", "offset": [3, 0, 0], "shape": [1, pieces, 1]}
    return [("file", i, one | {"start": i, "stop": i + 1}) for i in range(pieces)]


def rows(ranks: int, responses: int, tokens: int, folder: Path) -> dict[str, tuple[float, float]]:
    """Return (seconds, bytes) of each part on one rank."""
    mine = rollouts(responses, tokens, 0)
    packing, parcel = measured(lambda: list(map(packed, mine)))
    sent = pickle.dumps(parcel)
    receiving, _ = measured(lambda: receive(sent, ranks, {0: mine[0].prompt}))
    batch = batch_of(ranks, responses, tokens)
    planning, shares = measured(lambda: balance.plan(batch, max(1, ranks // RANKS_OF_REPLICA), BUDGET))
    making, plan_sent = measured(lambda: pack_plan(shares))
    taking, got = measured(lambda: read_plan(plan_sent))
    assert [[cut.tolist() for cut in share] for share in got] == [[cut.tolist() for cut in share] for share in shares]
    looking, _ = measured(lambda: look(folder, ranks // 8 or 1))
    found = index(ranks)
    reading, _ = measured(lambda: optimizer_shards.ShardReader(found))
    return {
        "pack a rank's responses": (packing, len(sent)),
        "read all ranks' responses into a batch": (receiving, ranks * len(sent)),
        "plan of the micro-batches": (planning, 0),
        "that plan from rank 0, without its way: made, packed, read": (planning + making + taking, len(plan_sent)),
        "look for nodes that failed": (looking, 0),
        "index of a sharded checkpoint (on resume)": (reading, len(json.dumps(found))),
    }


def growth(first: float, last: float, ranks: list[int]) -> str:
    if len(ranks) < 2 or first <= 0 or last <= 0:
        return "-"
    return f"{math.log(last / first) / math.log(ranks[-1] / ranks[0]):.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--responses", type=int, default=8, help="of each rank")
    parser.add_argument("--tokens", type=int, default=1000, help="of each response")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "start_0").mkdir()
        rows(args.ranks[0], args.responses, args.tokens, folder)  # warm up
        found = {ranks: rows(ranks, args.responses, args.tokens, folder) for ranks in args.ranks}
    print(f"| processor seconds of one rank | {' | '.join(f'{n:,} ranks' for n in args.ranks)} | exponent | largest |")
    print(f"| --- | {' | '.join('---' for _ in args.ranks)} | --- | --- |")
    for what in found[args.ranks[0]]:
        seconds = [found[ranks][what][0] for ranks in args.ranks]
        size = found[args.ranks[-1]][what][1]
        largest = f"{size / 2**20:.1f} MiB" if size else "-"
        cells = " | ".join(f"{each:.3g}" for each in seconds)
        print(f"| {what} | {cells} | {growth(seconds[0], seconds[-1], args.ranks)} | {largest} |")
    last = args.ranks[-1]
    tokens = last * args.responses * args.tokens
    seconds, size = found[last]["read all ranks' responses into a batch"]
    print(f"\n{seconds / tokens * 1e9:.1f} ns and {size / tokens:.1f} bytes a token of a batch of {tokens:,}")


if __name__ == "__main__":
    main()
