"""Sends tensors from rank 0 to other processes over a network, through a pair of buckets in each process.

Rank 0 announces full buckets over gloo and broadcasts them: with NCCL between GPUs if every process has its own GPU,
else with gloo between hosts. The process groups are separate from those of the trainer and of the engine, and are
torch's, so that the trainer does not need vLLM.

Neither the store through which the processes meet nor gloo asks for a password. So each announcement, which has the
checksum of its bucket, carries a code (HMAC) of the secret that both sides have from the server's authenticated HTTP,
and of its number in the connection: a receiver takes weights only from a sender with the secret, and none twice.
"""

import hashlib
import hmac
import json
import os
import socket
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import astuple
from datetime import timedelta
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rft.inference.transport.buckets import BUCKET_BYTES, Buckets, Full, Piece
from megatron_rft.utils.errors import RunFailed

CODE_BYTES = hashlib.sha256().digest_size
HOST, GPU = "gloo, host memory", "NCCL, GPU memory"


class Link:
    """One process's side of the connection. `control` carries announcements, `data` the buckets' bytes."""

    def __init__(self, control: dist.Backend, data: dist.Backend, device: torch.device, secret: str):
        self.control, self.data, self.device, self.secret = control, data, device, secret
        self.announced = 0  # announcements that were sent or received
        self.buckets = Buckets(torch.empty(2, BUCKET_BYTES, dtype=torch.uint8, device=device))

    def next_code(self, words: bytes) -> bytes:
        """Authenticate the next announcement."""
        self.announced += 1
        return hmac.digest(self.secret.encode(), self.announced.to_bytes(8, "big") + words, "sha256")

    def close(self) -> None:
        """Abort an NCCL group, which would otherwise wait for peers that are gone."""
        if self.data is not self.control:
            self.data.abort()


def transport(ends: list[str | None]) -> str:
    """Return the transport for processes with these GPUs (None: no GPU). NCCL does not support two ranks on one GPU."""
    return GPU if None not in ends and len(set(ends)) == len(ends) else HOST


def rendezvous(host: str, size: int, timeout_s: float, port: int | None = None) -> dist.TCPStore:
    """Open the store through which `size` processes connect. `host`: the address of rank 0. Rank 0 passes no `port`,
    and tells the others the free one it got (`.port`). Rank 0 listens on this address only."""
    limit = timedelta(seconds=timeout_s)
    if port is not None:
        return dist.TCPStore(host, port, size, False, limit, wait_for_workers=False)
    listening = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port, descriptor = listening.getsockname()[1], listening.detach()
    return dist.TCPStore(host, port, size, True, limit, wait_for_workers=False, master_listen_fd=descriptor)


def connect(
    store: dist.TCPStore, rank: int, size: int, timeout_s: float, device: torch.device | None = None, secret: str = ""
) -> Link:
    """Connect to the other `size` - 1 processes. Raises RuntimeError if they do not join in time.

    `device`: this process's GPU for the transport GPU, None for HOST. All processes must use the same transport.
    `secret`: the same in all of them; a process with another one does not meet them. The store does not learn it.
    """
    limit, name = timedelta(seconds=timeout_s), hashlib.sha256(secret.encode()).hexdigest()
    control = dist.ProcessGroupGloo(dist.PrefixStore(f"weights/{name}", store), rank, size, limit)
    if device is None:
        return Link(control, control, torch.device("cpu"), secret)
    link = Link(control, nccl(dist.PrefixStore(f"weights/{name}/nccl", store), rank, size, limit), device, secret)
    broadcast(link.data, link.buckets.slots[0, :8]).wait()  # NCCL connects in its first broadcast: fail before training
    torch.cuda.synchronize(device)
    return link


def nccl(store: dist.Store, rank: int, size: int, limit: timedelta) -> dist.Backend:
    """Create a group in which a lost peer raises an error after `limit`; by default torch would end this process."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    with patch.dict(os.environ, TORCH_NCCL_BLOCKING_WAIT="1", TORCH_NCCL_ASYNC_ERROR_HANDLING="0"):
        return dist.ProcessGroupNCCL(store, rank, size, options)


def send(link: Link, stream: Iterable[tuple[str, Tensor]]) -> None:
    pending: deque[dist.Work] = deque()

    def tell(full: Full) -> None:
        announce(link, full)
        pending.append(broadcast(link.data, link.buckets.content(full)))

    link.buckets.send(stream, tell, lambda: pending.popleft().wait())
    announce(link, None)


def receive(link: Link) -> Iterator[tuple[str, Tensor]]:
    """Yield the stream of `send`. Raises RunFailed at its end if a bucket arrived damaged, and at
    once if an announcement is not of a sender with the secret."""

    def arriving() -> Iterator[Full]:
        while (full := next_announced(link)) is not None:
            broadcast(link.data, link.buckets.content(full)).wait()
            yield full

    return link.buckets.receive(arriving(), read=lambda: None)


def announce(link: Link, full: Full | None) -> None:
    """Tell the receivers which bucket is broadcast next; None: the stream has ended."""
    what = full and [full.slot, full.total, [astuple(piece) for piece in full.pieces]]
    words = json.dumps(what).encode()
    message = torch.frombuffer(bytearray(link.next_code(words) + words), dtype=torch.uint8)
    broadcast(link.control, torch.tensor([len(message)])).wait()
    broadcast(link.control, message).wait()


def next_announced(link: Link) -> Full | None:
    length = torch.zeros(1, dtype=torch.long)
    broadcast(link.control, length).wait()
    message = torch.empty(int(length), dtype=torch.uint8)
    broadcast(link.control, message).wait()
    code, words = bytes(message[:CODE_BYTES].numpy()), bytes(message[CODE_BYTES:].numpy())
    if not hmac.compare_digest(code, link.next_code(words)):
        raise RunFailed("the weights are refused: they are announced by a process that does not have the run's secret")
    if (what := json.loads(words)) is None:
        return None
    slot, total, pieces = what
    return Full(slot, tuple(Piece(*each) for each in pieces), total)


def broadcast(group: dist.Backend, tensor: Tensor) -> dist.Work:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    return group.broadcast([tensor], options)
