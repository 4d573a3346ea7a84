"""Sends a stream of tensors of any total size through two buckets of bytes, in any kind of memory.

The sender fills one bucket while the receiver reads the other. Tensors are concatenated, and split where a bucket ends.
Both sides share the same two buckets (`shared_memory.py`), or each side has its own and full ones are sent
(`network.py`). With buckets in GPU memory the received tensors are on the GPU too.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rft.utils.errors import RunFailed

BUCKET_BYTES = 64 << 20


@dataclass(frozen=True)
class Piece:
    """`length` bytes of a tensor, from its byte `start` on, stored at `offset` in the bucket."""

    name: str
    dtype: str  # torch's name, such as bfloat16: a network sends pieces as JSON
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

    @property
    def length(self) -> int:
        return sum(piece.length for piece in self.pieces)


class Buckets:
    """`slots`: [2, size] uint8; `size` is a multiple of 8."""

    def __init__(self, slots: Tensor):
        self.slots, self.size = slots, slots.shape[1]

    def content(self, full: Full) -> Tensor:
        """Return the bytes of a full bucket, [n] uint8."""
        return self.slots[full.slot, : full.length]

    # ---- sender

    def send(
        self, stream: Iterable[tuple[str, Tensor]], tell: Callable[[Full], None], wait: Callable[[], object]
    ) -> None:
        """Send the stream through the buckets. `tell` announces a full one; `wait` returns when one has been read."""
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
                dtype = str(tensor.dtype).removeprefix("torch.")
                pieces.append(Piece(name, dtype, tuple(tensor.shape), start, used, length))
                used += length
        if pieces:
            pass_on()
        if unread:
            wait()

    # ---- receiver

    def receive(
        self, full: Iterable[Full], read: Callable[[], None], device: torch.device | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the sender's stream, each in new memory. `read` is called when a bucket has been read.

        `device`: of the tensors; None: that of the buckets.

        Raises:
            RunFailed: the checksum of a bucket is wrong. Raised at the end of the stream, because the sender always
                sends the whole stream.
        """
        damaged = []
        for bucket in full:
            content = self.content(bucket).to(device or self.slots.device)
            if total(content) != bucket.total:
                damaged.append(f"the bucket of weights that begins with {bucket.pieces[0].name} was damaged")
            ready = []
            for piece in bucket.pieces:
                if piece.start == 0:
                    dtype = getattr(torch, piece.dtype)
                    tensor = torch.empty(piece.shape, dtype=dtype, device=content.device)
                    whole = as_bytes(tensor)
                whole[piece.start : piece.start + piece.length] = content[piece.offset : piece.offset + piece.length]
                if piece.start + piece.length == tensor.nbytes:
                    ready.append((piece.name, tensor))
            if content.is_cuda:  # wait until the GPU has read the bucket, before another process may overwrite it
                torch.cuda.synchronize(content.device)
            read()
            yield from ready
        if damaged:
            raise RunFailed(damaged[0])


def cuts(length: int, free: int, size: int) -> Iterator[tuple[int, int]]:
    """Split `length` bytes into pieces (start, length) for a bucket with `free` bytes left and further ones of `size`.
    What fits whole into the next bucket, but not into this one, is not split."""
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
    """View a tensor as [n] uint8; a tensor that is not contiguous is copied first."""
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)


def total(data: Tensor) -> int:
    """Return a fast checksum of [n] uint8: the sum of its 64-bit words and of the remaining bytes."""
    words = len(data) // 8 * 8
    aligned = data[:words].view(torch.int64) if data.data_ptr() % 8 == 0 else data[:words].clone().view(torch.int64)
    return (int(aligned.sum()) + int(data[words:].sum())) % 2**64
