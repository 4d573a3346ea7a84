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
    """`length` bytes of a tensor, from its byte `start` on. A bucket has its pieces one after the other."""

    name: str
    dtype: str  # torch's name, such as bfloat16: a network sends pieces as JSON
    shape: tuple[int, ...]
    start: int
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
            data, start, dtype = as_bytes(tensor), 0, str(tensor.dtype).removeprefix("torch.")
            for part in data.tensor_split(tuple(range(self.size - used, len(data), self.size))):
                self.slots[slot, used : used + len(part)] = part
                pieces.append(Piece(name, dtype, tuple(tensor.shape), start, len(part)))
                start, used = start + len(part), used + len(part)
                if used == self.size:
                    pass_on()
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
            ready, parts = [], content.split([piece.length for piece in bucket.pieces])
            for piece, part in zip(bucket.pieces, parts, strict=True):
                if piece.start == 0:
                    tensor = torch.empty(piece.shape, dtype=getattr(torch, piece.dtype), device=content.device)
                end = piece.start + piece.length
                as_bytes(tensor)[piece.start : end] = part
                if end == tensor.nbytes:
                    ready.append((piece.name, tensor))
            if content.is_cuda:  # wait until the GPU has read the bucket, before another process may overwrite it
                torch.cuda.synchronize(content.device)
            read()
            yield from ready
        if damaged:
            raise RunFailed(damaged[0])


def as_bytes(tensor: Tensor) -> Tensor:
    """View a tensor as [n] uint8; a tensor that is not contiguous is copied first."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def total(data: Tensor) -> int:
    """Return a fast checksum of a bucket's bytes [n] uint8: the sum of its 64-bit words and of the remaining bytes."""
    words = len(data) // 8 * 8
    return (int(data[:words].view(torch.int64).sum()) + int(data[words:].sum())) % 2**64
