"""Tensors from one process to another through a little shared memory, however large the model.

Two buckets take turns: while the receiver reads one the sender fills the other. Tensors lie in them end to end, cut
where a bucket ends. The memory has no name and belongs to the two processes alone: it is gone when they are.
"""

import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_rft.errors import RunFailed

BUCKET_BYTES = 64 << 20


@dataclass(frozen=True)
class Piece:
    """`length` bytes of a tensor from its byte `start` on, at `offset` in the bucket."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    offset: int
    length: int


@dataclass(frozen=True)
class Full:
    """Bucket `slot` is ready to be read; `total` is the checksum of its bytes."""

    slot: int
    pieces: tuple[Piece, ...]
    total: int


class Buckets:
    """Two buckets in one anonymous file that a child inherits by its descriptor `fd`."""

    def __init__(self, fd: int | None = None, size: int = BUCKET_BYTES):
        if fd is None:
            fd = os.memfd_create("weights")
            os.ftruncate(fd, 2 * size)
        self.fd, self.size = fd, os.fstat(fd).st_size // 2
        self._memory = mmap.mmap(fd, 2 * self.size)
        whole = torch.from_numpy(np.frombuffer(self._memory, dtype=np.uint8))  # [2 size]
        self.slots = whole.view(2, self.size)

    def close(self) -> None:
        """The memory goes when the last tensor that looks at it does."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    # ---- sender

    def send(
        self, stream: Iterable[tuple[str, Tensor]], tell: Callable[[Full], None], wait: Callable[[], None]
    ) -> None:
        """Put the stream through the buckets. `tell` passes a full one on, `wait` returns when one has been read."""
        slot, used, pieces, unread = 0, 0, [], 0

        def pass_on() -> None:
            nonlocal slot, used, pieces, unread
            tell(Full(slot, tuple(pieces), total(self.slots[slot, :used])))
            unread += 1
            if unread == 2:
                wait()
                unread -= 1
            slot, used, pieces = 1 - slot, 0, []

        for name, tensor in stream:
            data = as_bytes(tensor)
            for start, length in cuts(len(data), self.size - used, self.size):
                if used + length > self.size:
                    pass_on()
                self.slots[slot, used : used + length] = data[start : start + length]
                pieces.append(Piece(name, tensor.dtype, tuple(tensor.shape), start, used, length))
                used += length
        if pieces:
            pass_on()
        if unread:
            wait()

    # ---- receiver

    def receive(self, full: Iterable[Full], read: Callable[[], None]) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the sender's stream, each in memory of its own; `read` says that a bucket may be filled again.

        Raises:
            RunFailed: what is in a bucket is not what the sender put there.
        """
        whole: Tensor | None = None  # of the tensor under way, its bytes
        for bucket in full:
            if total(self.slots[bucket.slot, : sum(piece.length for piece in bucket.pieces)]) != bucket.total:
                raise RunFailed(f"the bucket of weights that begins with {bucket.pieces[0].name} was damaged")
            ready = []
            for piece in bucket.pieces:
                if piece.start == 0:
                    tensor = torch.empty(piece.shape, dtype=piece.dtype)
                    whole = tensor.view(-1).view(torch.uint8) if tensor.numel() else tensor
                whole[piece.start : piece.start + piece.length] = self.slots[
                    bucket.slot, piece.offset : piece.offset + piece.length
                ]
                if piece.start + piece.length == tensor.nbytes:
                    ready.append((piece.name, tensor))
            read()
            yield from ready


def cuts(length: int, free: int, size: int) -> Iterator[tuple[int, int]]:
    """(start, length) of the pieces of `length` bytes: the first as large as `free` allows, unless it is whole in the
    next bucket of `size`."""
    start = 0
    if length > free and (length <= size or not free):
        free = size
    while True:
        part = min(length - start, free)
        yield start, part
        start, free = start + part, size
        if start >= length:
            return


def as_bytes(tensor: Tensor) -> Tensor:
    """[n] uint8, on the host."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


def total(data: Tensor) -> int:
    """A checksum as fast as memory: [n] uint8 -> the sum of its 64-bit words, and of the bytes left over."""
    words = len(data) // 8 * 8
    aligned = data[:words].view(torch.int64) if data.data_ptr() % 8 == 0 else data[:words].clone().view(torch.int64)
    return (int(aligned.sum()) + int(data[words:].sum())) % 2**64
