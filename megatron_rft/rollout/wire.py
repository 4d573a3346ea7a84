"""Tensors from one process to others over TCP: each is announced, then broadcast. Both ends; rank 0 sends.

It goes through a gloo group of its own, apart from those of the trainer and of the engine.
"""

import json
from collections.abc import Iterable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rft.errors import RunFailed
from megatron_rft.rollout.buckets import as_bytes, total


def connect(host: str, port: int, rank: int, size: int, timeout_s: float) -> dist.ProcessGroup:
    """Returns when all `size` processes are there; RuntimeError when they are not in time."""
    limit = timedelta(seconds=timeout_s)
    store = dist.TCPStore(host, port, size, rank == 0, limit, wait_for_workers=False)
    return dist.ProcessGroupGloo(dist.PrefixStore("weights", store), rank, size, limit)


def send(group: dist.ProcessGroup, stream: Iterable[tuple[str, Tensor]]) -> None:
    for name, tensor in stream:
        data = as_bytes(tensor)
        _announce(group, [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), total(data)])
        _broadcast(group, data)
    _announce(group, None)


def receive(group: dist.ProcessGroup) -> Iterator[tuple[str, Tensor]]:
    """What `send` sends, to its end. RunFailed, after the end, where a tensor was damaged on its way."""
    damaged = []
    while (found := _hear(group)) is not None:
        name, dtype, shape, expected = found
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        data = tensor.view(-1).view(torch.uint8)
        _broadcast(group, data)
        if total(data) != expected:
            damaged.append(name)
        yield name, tensor
    if damaged:
        raise RunFailed(f"{damaged[0]} was damaged on its way")


def _announce(group: dist.ProcessGroup, what: list | None) -> None:
    words = torch.frombuffer(bytearray(json.dumps(what).encode()), dtype=torch.uint8)
    _broadcast(group, torch.tensor([len(words)]))
    _broadcast(group, words)


def _hear(group: dist.ProcessGroup) -> list | None:
    length = torch.zeros(1, dtype=torch.long)
    _broadcast(group, length)
    words = torch.empty(int(length), dtype=torch.uint8)
    _broadcast(group, words)
    return json.loads(bytes(words.numpy()))


def _broadcast(group: dist.ProcessGroup, tensor: Tensor) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([tensor], options).wait()
