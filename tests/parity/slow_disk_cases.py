"""Two ranks, of which the first writes until the other has waited for it: in the group that has a longer limit than a
step's."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import megatron_rft.megatron  # noqa: F401  prepares megatron-core for this host
from megatron_rft.config import Batching, Megatron
from megatron_rft.megatron import checkpoint, parallel, weights
from megatron_rft.megatron.actor import Actor
from megatron_rft.megatron.checkpoint import Checkpointer
from megatron_rft.utils.position import here, read
from tests.parity.hf_cases import FAMILIES


def waits_for_the_disk() -> bool:
    position = read(folder / "rank_1.position", 1)
    return position is not None and position.waiting and position.last.split()[0] == group.group_name


def slow(write):
    def wrapped(*arguments):
        deadline = time.monotonic() + 600
        while parallel.rank() == 0 and not waits_for_the_disk():
            assert time.monotonic() < deadline, read(folder / "rank_1.position", 1)
            time.sleep(0.05)
        return write(*arguments)

    return wrapped


folder = Path(sys.argv[1])
here.open(folder / f"rank_{os.environ['RANK']}.position")
parallel.initialize(Megatron())
group = parallel.host_group("checkpoint")
limits = [each._get_backend(torch.device("cpu")).options._timeout for each in (dist.group.WORLD, group)]
assert limits[0] < limits[1], limits
config = FAMILIES["qwen3"]
actor = Actor(config, Megatron(), Batching(), "fp32", optimizer={"lr": 1e-3})
actor.load(weights.random_tensors(config, 0))

checkpoint._write = slow(checkpoint._write)
writer = Checkpointer(folder / "checkpoints", {"actor": actor})
writer.save(1, {}, {"x": torch.zeros(2)})
writer.close()
weights.FolderWriter.finish = slow(weights.FolderWriter.finish)
weights.save_folder(actor.stream(), folder / "export", config)
print("done", flush=True)
parallel.shutdown()
