"""Measures how long a rank's forked writer takes for its part of the weights: in the two processes that megatron-core
forks, and in the two threads that a run has instead.

    OMP_NUM_THREADS=1 python tools/bench/checkpoint_writer.py FOLDER [--mib 1536] [--rounds 3]

FOLDER: on the disk to measure. The files are flushed and then removed. Fastest and slowest of the rounds, in turns,
with the fork; no digests.
"""

import argparse
import multiprocessing
import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed.checkpoint.filesystem import _StorageWriterTransforms
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from megatron_rft.megatron import checkpoint

SMALLEST = ". --mib 4 --rounds 1"  # tests/bench
SIDE = 1024  # of a tensor in bf16: 2 MiB


def buckets(folder: str, tensors: list[torch.Tensor]) -> list[filesystem_async.WriteBucket]:
    """Two files with half of the tensors each."""
    items = []
    for number, tensor in enumerate(tensors):
        chunk = ChunkStorageMetadata(torch.Size([0, 0]), tensor.shape)
        data = TensorWriteData(chunk, TensorProperties(tensor.dtype), tensor.shape)
        index = MetadataIndex(f"weight.{number}", torch.Size([0, 0]))
        items.append((WriteItem(index, WriteItemType.SHARD, tensor_data=data), tensor))
    return [(Path(folder) / f"{number}.distcp", f"{number}.distcp", ([], items[number::2])) for number in range(2)]


def written(folder: Path, tensors: list[torch.Tensor]) -> tuple[float, float]:
    """Seconds of the clock and of the processor."""
    with TemporaryDirectory(dir=folder) as files:
        results: Any = checkpoint.Results()
        before, start = os.times(), time.perf_counter()
        if (pid := os.fork()) == 0:
            write = filesystem_async.FileSystemWriterAsync.write_preloaded_data_multiproc
            write([_StorageWriterTransforms()], False, 0, buckets(files, tensors), results)
            os._exit(0)
        os.waitpid(pid, 0)
        clock, after = time.perf_counter() - start, os.times()
        found = results.get_nowait()
    assert isinstance(found, dict) and len(found) == 2, f"not written: {found}"
    return clock, sum(after[2:4]) - sum(before[2:4])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mib", type=int, default=1536, help="MiB of weights")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    tensors = [torch.randn(SIDE, SIDE).bfloat16() for _ in range(arguments.mib // 2)]
    checkpoint.prepare_writer()
    kinds = {"processes": multiprocessing, "threads": filesystem_async.mp}
    found = {name: [] for name in kinds}
    for _ in range(arguments.rounds):
        for name, filesystem_async.mp in kinds.items():
            found[name].append(written(arguments.folder, tensors))
    print("| | clock, s | processor, s |\n|---|---|---|")
    for name, times in found.items():
        spans = (f"{min(each):.2f} to {max(each):.2f}" for each in zip(*times, strict=True))
        print(f"| {name} | {' | '.join(spans)} |")


if __name__ == "__main__":
    main()
