"""Shares memory for buckets between a trainer and an engine's process: host memory, or memory of the rank's GPU."""

import mmap
import os
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from megatron_rft.inference.transport.buckets import BUCKET_BYTES
from megatron_rft.utils.errors import RunFailed

DEVICE = 6  # position of the device's index in the arguments of torch's `rebuild_cuda_tensor`


class HostMemory:
    """Two buckets in an anonymous file, whose descriptor `fd` a child process inherits. The kernel frees it when both
    processes have ended."""

    def __init__(self, fd: int | None = None, size: int = BUCKET_BYTES):
        if fd is None:
            fd = os.memfd_create("weights")
            os.ftruncate(fd, 2 * size)
        self.fd, size = fd, os.fstat(fd).st_size // 2
        memory = mmap.mmap(fd, 2 * size)
        self.slots = torch.from_numpy(np.frombuffer(memory, dtype=np.uint8)).view(2, size)

    def close(self) -> None:
        """Close the descriptor. The memory is freed with the last tensor that views it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@dataclass(frozen=True)
class Handle:
    """A handle to GPU memory for another process of this machine (CUDA IPC)."""

    gpu: str
    arguments: tuple  # of torch's `rebuild_cuda_tensor`


def shared(slots: Tensor) -> Handle:
    """Return a handle, which one process may open once. `slots` must live as long as that process."""
    return Handle(gpu_name(slots.device.index), reduce_tensor(slots)[1])


def opened(handle: Handle) -> Tensor:
    """Open the other process's memory. The same GPU may have another index in this process."""
    names = gpus()
    if handle.gpu not in names:
        raise RunFailed(f"GPU {handle.gpu} is not visible here")
    arguments = list(handle.arguments)
    arguments[DEVICE] = names.index(handle.gpu)
    return rebuild_cuda_tensor(*arguments)


def gpus() -> list[str]:
    """Return the UUIDs of the GPUs that this process sees."""
    return [gpu_name(index) for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else []


def gpu_name(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def local_gpu() -> str | None:
    """Return the UUID of this rank's GPU, or None."""
    return gpu_name(torch.cuda.current_device()) if torch.cuda.is_available() else None
