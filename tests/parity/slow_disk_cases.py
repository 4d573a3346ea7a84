"""Two ranks with a step limit of four seconds, of which the first writes for twelve."""

import sys
import time
from pathlib import Path

import torch

import megatron_rft.megatron  # noqa: F401  prepares megatron-core for this host
from megatron_rft.config import Batching, Faults, Megatron
from megatron_rft.megatron import checkpoint, parallel, weights
from megatron_rft.megatron.actor import Actor
from megatron_rft.megatron.checkpoint import Checkpointer
from tests.parity.hf_cases import FAMILIES

DISK_S = 12.0


def slow(write):
    def wrapped(*arguments):
        if parallel.rank() == 0:
            time.sleep(DISK_S)
        return write(*arguments)

    return wrapped


folder = Path(sys.argv[1])
parallel.initialize(Megatron(), faults=Faults(step_limit_s=4.0))
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
