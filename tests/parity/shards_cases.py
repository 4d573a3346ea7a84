"""Runs on four ranks: the optimizer's state, written by each rank for itself in one layout and read in others, is that
of megatron-core's gathered format, bit for bit.

Prints for each pair of layouts how many tensors were compared and how many differ, and the largest share of the state
that one rank wrote.
"""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import megatron_rft.megatron  # noqa: F401  prepares megatron-core for this host
from megatron_rft.config import Batching
from megatron_rft.megatron import optimizer_shards, parallel, weights
from megatron_rft.megatron.actor import Actor
from megatron_rft.megatron.checkpoint import Checkpointer
from megatron_rft.objectives.base import counts
from megatron_rft.records import Batch
from megatron_rft.utils.checkpoint_files import damage, latest
from tests.made import made
from tests.parity.hf_cases import FAMILIES, section
from tests.parity.layouts import shutdown

LOSS = made("sft").loss
LAYOUTS = {
    "qwen3": [dict(tp=2), dict(pp=2), dict(tp=4), {}, dict(tp=2, pp=2)],
    "qwen3_moe": [dict(tp=2, ep=2, etp=1, sp=True)],  # megatron-core cannot read its own in another without CUDA
}


def build(config, seed=0, precision="bf16", **layout) -> Actor:
    parallel.destroy_layout()
    parallel.initialize(section(**layout))
    options = {"lr": 1e-2, "use_distributed_optimizer": True, "clip_grad": 1.0}
    actor = Actor(config, section(**layout), Batching(), precision, optimizer=options)
    actor.load(weights.random_tensors(config, seed))
    return actor


def trained(config, **layout) -> Actor:
    actor = build(config, **layout)
    ids = torch.randint(0, config.vocab_size, (8, 12), generator=torch.Generator().manual_seed(3)).tolist()
    batch = Batch.of([each[:4] for each in ids], [each[4:] for each in ids])
    for _ in range(2):
        actor.step(batch, LOSS, counts(batch), learning_rate=1e-2)
    return actor


def gather(actor: Actor) -> None:
    """Let megatron-core's checkpoint have the optimizer's state again."""
    for part in optimizer_shards.parts(actor.optimizer.megatron):
        del part.sharded_param_state_fully_reshardable, part.load_parameter_state_from_fully_reshardable


def read(config, folder: Path, gathers: bool, **layout) -> list[torch.Tensor]:
    actor = build(config, seed=1, **layout)
    reader = Checkpointer(folder, {"actor": actor})
    with pytest.MonkeyPatch.context() as patch:
        if gathers:
            gather(actor)
            patch.setattr(optimizer_shards.ShardReader, "load", lambda *_: None)
        reader.load(latest(folder))
    reader.close()
    return [each.clone() for each in actor.optimizer.tensors()] + actor.snapshot()


def main():
    folder = Path(sys.argv[1])
    parallel.initialize(section())
    for family, layouts in LAYOUTS.items():
        config = FAMILIES[family]
        first = trained(config, **layouts[0])
        for gathers in (True, False):
            writer = Checkpointer(folder / f"{family}_{gathers}", {"actor": first})
            if gathers:
                gather(first)
            writer.save(1, {}, {})
            writer.close()
        step = latest(folder / f"{family}_False")
        sizes = [path.stat().st_size for path in step.glob("optimizer_*.safetensors")]
        assert len(sizes) == 4 and not damage(step)
        for layout in layouts:
            expected, found = (
                read(config, folder / f"{family}_{gathers}", gathers, **layout) for gathers in (True, False)
            )
            differ = sum(not torch.equal(a, b) for a, b in zip(expected, found, strict=True))
            told = [None] * 4
            dist.all_gather_object(told, (len(expected), differ))
            if dist.get_rank() == 0:
                compared, wrong = (sum(column) for column in zip(*told, strict=True))
                name = " ".join(f"{k}{v}" for k, v in layout.items()) or "dp4"
                share = max(sizes) / sum(sizes)
                print("CASE", family, name, compared, wrong, f"{share:.2f}", sep="\t", flush=True)
    shutdown()


if __name__ == "__main__":
    main()
