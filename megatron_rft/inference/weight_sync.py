"""One weight sync, proven. The stream's collectives involve every rank, so it is exhausted whatever goes wrong.

The engine itself refuses tensors that are unknown, missing, repeated, misshapen, non-finite, or zero where they were
not (`Engine.load_weights`). Here are what no engine can know of itself: that it took the whole stream and, on request,
that what it holds equals the stream bit for bit in its own dtype (but for what it rounds).
"""

import time
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from megatron_rft.inference.engine import Engine, checksum
from megatron_rft.utils.errors import RunFailed


def push(stream: Iterable[tuple[str, Tensor]], engine: Engine, version: int, verify: bool = False) -> dict[str, float]:
    """Load `stream` into `engine` as weights of `version`; RunFailed, naming the tensor, where the proof fails."""
    start = time.perf_counter()
    recorder = ChecksumRecorder(stream, engine.dtype if verify else None)
    try:
        engine.load_weights(recorder, version)
    finally:
        left = recorder.exhaust()
    if left is not None:
        raise RunFailed(f"weights of version {version}: the engine stopped reading before {left}")
    if verify and (held := engine.checksums()):
        compare(recorder.checksums, held, version)
    return {
        "sync/seconds": time.perf_counter() - start,
        "sync/bytes": float(recorder.bytes),
        "sync/tensors": float(recorder.tensors),
    }


class ChecksumRecorder:
    """Passes a stream on, and remembers what came by."""

    def __init__(self, stream: Iterable[tuple[str, Tensor]], checksum_dtype: torch.dtype | None):
        """`checksum_dtype`: the engine's, in which checksums are taken; None: take none."""
        self._stream, self._dtype = iter(stream), checksum_dtype
        self.bytes, self.tensors, self.checksums = 0, 0, {}

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._stream:
            self.bytes += tensor.nbytes
            self.tensors += 1
            if self._dtype is not None:
                self.checksums[name] = checksum(tensor.to(self._dtype))
            yield name, tensor

    def exhaust(self) -> str | None:
        """Read to the end; the first name that nobody had asked for."""
        left = [name for name, _ in self._stream]
        return left[0] if left else None


def compare(sent: dict[str, int], held: dict[str, int | None], version: int) -> None:
    """None in `held`: compared by the engine, which rounds that tensor."""
    different = [name for name in sent.keys() | held.keys() if held.get(name, -1) not in (None, sent.get(name))]
    if different:
        raise RunFailed(
            f"weights of version {version}: {min(different)} in the engine is not what the actor sent "
            f"({len(different)} of {len(sent)} tensors differ)"
        )
