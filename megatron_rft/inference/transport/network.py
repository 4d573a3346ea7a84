"""Tensors from one process to others over a network, through a pair of buckets at each end. Rank 0 sends.

Full buckets are announced over gloo and then broadcast: by NCCL from GPU to GPU where every end has one of its own,
else by gloo from host to host. The groups are torch's, so that a trainer needs no vLLM, and apart from those of the
trainer and of the engine.
"""

import json
import os
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rft.inference.transport.buckets import BUCKET_BYTES, Buckets, Full, Piece

HOST, GPU = "gloo, host memory", "NCCL, GPU memory"


class Link:
    """One end of the connection. `data`: the group that the buckets' bytes go through."""

    def __init__(self, control: dist.Backend, data: dist.Backend, device: torch.device):
        self.control, self.data, self.device = control, data, device
        self.buckets = Buckets(torch.empty(2, BUCKET_BYTES, dtype=torch.uint8, device=device))

    def close(self) -> None:
        """Abort an NCCL group, which would otherwise wait for peers that are gone."""
        if self.data is not self.control:
            self.data.abort()


def transport(ends: list[str | None]) -> str:
    """The transport for these ends: the GPU of each, or None. NCCL does not support two ranks on one GPU."""
    return GPU if None not in ends and len(set(ends)) == len(ends) else HOST


def meeting(host: str, size: int, timeout_s: float, port: int | None = None) -> dist.TCPStore:
    """Where `size` processes meet. Rank 0 opens it without a `port`: `.port` is the free one that it got, which the
    others are told. `host`: of rank 0, as the others reach it."""
    limit = timedelta(seconds=timeout_s)
    return dist.TCPStore(host, port or 0, size, port is None, limit, wait_for_workers=False)


def connect(store: dist.TCPStore, rank: int, size: int, timeout_s: float, device: torch.device | None = None) -> Link:
    """Returns when all `size` processes are there; RuntimeError when they are not in time.

    `device`: this end's GPU, for the transport GPU; None for HOST. All ends agree on that.
    """
    limit = timedelta(seconds=timeout_s)
    control = dist.ProcessGroupGloo(dist.PrefixStore("weights", store), rank, size, limit)
    if device is None:
        return Link(control, control, torch.device("cpu"))
    link = Link(control, nccl(dist.PrefixStore("weights/nccl", store), rank, size, limit), device)
    broadcast(link.data, link.buckets.slots[0, :8]).wait()  # the first one builds the group: it fails before training
    torch.cuda.synchronize(device)
    return link


def nccl(store: dist.Store, rank: int, size: int, limit: timedelta) -> dist.Backend:
    """A group in which a lost peer raises an error after `limit`; by default torch would end this process."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    with environment(TORCH_NCCL_BLOCKING_WAIT="1", TORCH_NCCL_ASYNC_ERROR_HANDLING="0"):
        return dist.ProcessGroupNCCL(store, rank, size, options)


@contextmanager
def environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def send(link: Link, stream: Iterable[tuple[str, Tensor]]) -> None:
    under_way: deque[dist.Work] = deque()

    def tell(full: Full) -> None:
        announce(link.control, full)
        under_way.append(broadcast(link.data, link.buckets.content(full)))

    link.buckets.send(stream, tell, lambda: under_way.popleft().wait())
    announce(link.control, None)


def receive(link: Link) -> Iterator[tuple[str, Tensor]]:
    """The stream of `send`. Raises RunFailed at its end if a bucket arrived damaged."""

    def arriving() -> Iterator[Full]:
        while (full := hear(link.control)) is not None:
            broadcast(link.data, link.buckets.content(full)).wait()
            yield full

    return link.buckets.receive(arriving(), read=lambda: None)


def announce(group: dist.Backend, full: Full | None) -> None:
    what = full and [full.slot, full.total, [_plain(piece) for piece in full.pieces]]
    words = torch.frombuffer(bytearray(json.dumps(what).encode()), dtype=torch.uint8)
    broadcast(group, torch.tensor([len(words)])).wait()
    broadcast(group, words).wait()


def hear(group: dist.Backend) -> Full | None:
    length = torch.zeros(1, dtype=torch.long)
    broadcast(group, length).wait()
    words = torch.empty(int(length), dtype=torch.uint8)
    broadcast(group, words).wait()
    if (what := json.loads(bytes(words.numpy()))) is None:
        return None
    slot, total, pieces = what
    return Full(slot, tuple(_piece(*each) for each in pieces), total)


def _plain(piece: Piece) -> list:
    dtype = str(piece.dtype).removeprefix("torch.")
    return [piece.name, dtype, piece.shape, piece.start, piece.offset, piece.length]


def _piece(name: str, dtype: str, shape: list[int], start: int, offset: int, length: int) -> Piece:
    return Piece(name, getattr(torch, dtype), tuple(shape), start, offset, length)


def broadcast(group: dist.Backend, tensor: Tensor) -> dist.Work:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    return group.broadcast([tensor], options)
