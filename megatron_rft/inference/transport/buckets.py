"""A stream of tensors through two buckets of bytes, however large the model: the protocol, whatever the memory is.

Two buckets take turns: while the receiver reads one the sender fills the other. Tensors lie in them end to end, cut
where a bucket ends. Both ends see the same two buckets (shared memory of one machine, `shared_memory.py`), or each has
its own and a full one is sent (`wire.py`). On a GPU they lie in its memory, and so do the tensors that come out.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rft.utils.errors import RunFailed

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

    @property
    def length(self) -> int:
        return sum(piece.length for piece in self.pieces)


class Buckets:
    """`slots`: [2, size] uint8, of a size that 8 divides."""

    def __init__(self, slots: Tensor):
        self.slots, self.size = slots, slots.shape[1]

    def content(self, full: Full) -> Tensor:
        """[n] the bytes of a full bucket."""
        return self.slots[full.slot, : full.length]

    # ---- sender

    def send(
        self, stream: Iterable[tuple[str, Tensor]], tell: Callable[[Full], None], wait: Callable[[], None]
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
                pieces.append(Piece(name, tensor.dtype, tuple(tensor.shape), start, used, length))
                used += length
        if pieces:
            pass_on()
        if unread:
            wait()

    # ---- receiver

    def receive(
        self, full: Iterable[Full], read: Callable[[], None], device: torch.device | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the sender's stream, each in memory of its own; `read` says that a bucket may be filled again.

        `device`: where the tensors shall be; None: where the buckets are.

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
                    tensor = torch.empty(piece.shape, dtype=piece.dtype, device=content.device)
                    whole = as_bytes(tensor)
                whole[piece.start : piece.start + piece.length] = content[piece.offset : piece.offset + piece.length]
                if piece.start + piece.length == tensor.nbytes:
                    ready.append((piece.name, tensor))
            settle(content)
            read()
            yield from ready
        if damaged:
            raise RunFailed(damaged[0])


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
    """[n] uint8, where the tensor is; its own memory if that is contiguous."""
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)


def total(data: Tensor) -> int:
    """A checksum at the speed of memory: [n] uint8 -> the sum of its 64-bit words and of the remaining bytes."""
    words = len(data) // 8 * 8
    aligned = data[:words].view(torch.int64) if data.data_ptr() % 8 == 0 else data[:words].clone().view(torch.int64)
    return (int(aligned.sum()) + int(data[words:].sum())) % 2**64


def settle(tensor: Tensor) -> None:
    """Wait for the GPU, so that another process may overwrite what it has read."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
