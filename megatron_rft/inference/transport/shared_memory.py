"""Shares memory for buckets between a trainer and an engine's process: host memory, or memory of the rank's GPU."""

import os
from typing import BinaryIO

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from megatron_rft.inference.transport.buckets import BUCKET_BYTES

DEVICE = 6  # position of the device's index in the arguments of torch's `rebuild_cuda_tensor`


def host_memory(size: int = BUCKET_BYTES) -> BinaryIO:
    """Return an anonymous file for two buckets, whose descriptor a child process inherits. The kernel frees its memory
    when the file is closed and no tensor of `slots_of` views it, in both processes."""
    file = os.fdopen(os.memfd_create("weights"), "r+b")
    file.truncate(2 * size)
    return file


def slots_of(descriptor: int) -> Tensor:
    """Return the two buckets in a file of `host_memory`, [2, size] uint8."""
    bytes = os.fstat(descriptor).st_size
    return torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=bytes, dtype=torch.uint8).view(2, -1)


def shared(slots: Tensor) -> tuple[str, list]:
    """Return GPU memory as another process of this machine may open it once (CUDA IPC): the GPU, and the arguments of
    torch's `rebuild_cuda_tensor`. `slots` must live as long as that process."""
    return gpu_name(slots.device.index), list(reduce_tensor(slots)[1])


def opened(gpu: str, arguments: list) -> Tensor:
    """Open the other process's memory. The same GPU may have another index in this process."""
    arguments[DEVICE] = gpus().index(gpu)
    return rebuild_cuda_tensor(*arguments)


def gpus() -> list[str]:
    """Return the UUIDs of the GPUs that this process sees."""
    return [gpu_name(index) for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else []


def gpu_name(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def local_gpu() -> str | None:
    """Return the UUID of this rank's GPU, or None."""
    return gpu_name(torch.cuda.current_device()) if torch.cuda.is_available() else None
