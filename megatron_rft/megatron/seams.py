"""Where a rehearsal on tensors without values (rehearsal/) meets the code that it runs: the names of what happens, for
its counts, and the few acts that need values.

`now` does these acts and counts nothing. A rehearsal sets another one before it builds a model (`ShapeSeams`), and
replaces nothing else of the package.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from megatron_rft.conversion import HFFolder


class Seams:
    # ---- names

    def named(self, phase: str = "", part: str = "", category: str = "") -> AbstractContextManager:
        """In this context a phase of the step, or a part of one, is counted alone; new tensors are of the category."""
        return nullcontext()

    def other_weights(self) -> AbstractContextManager:
        """The actor computes with the weights of another model."""
        return nullcontext()

    def built(self, actor: Any) -> None:
        """A model has its weights' and gradients' memory."""

    def packed(self, config: Any, micro_batches: list, forward_only: bool) -> None:
        """A pass over these micro-batches begins."""

    # ---- acts

    def outputs(self, compute: Callable[[], dict], names: frozenset[str], size: int, critic: bool) -> dict[str, Tensor]:
        """Return what `compute` returns: [size] for each name."""
        return compute()

    def open_folder(self, path: str | Path, hf_config: Any) -> Callable[[str], Tensor]:
        return HFFolder(path, hf_config)

    def new_tensors(self, lookup: Callable[[str], Tensor], shapes: dict[str, tuple]) -> Callable[[str], Tensor]:
        """Return the lookup of new tensors of these shapes."""
        return lookup

    def save(self, storage: UntypedStorage, copy: list[Tensor] | None) -> list[Tensor]:
        """Start to copy a storage into `copy`, or into new host tensors where there are none of its size."""
        sizes, pinned = powers(storage.nbytes()), storage.device.type == "cuda"
        if copy is None or [len(each) for each in copy] != sizes:
            copy = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in sizes]
        for each, part in zip(copy, _bytes_of(storage).split(sizes), strict=True):
            each.copy_(part, non_blocking=True)
        return copy

    def empty(self, storage: UntypedStorage) -> None:
        storage.resize_(0)

    def refill(self, storage: UntypedStorage, size: int, copy: list[Tensor] | None) -> None:
        """From `copy`, or with zeros."""
        storage.resize_(size)
        if copy is None:
            _bytes_of(storage).zero_()
        else:
            for each, part in zip(copy, _bytes_of(storage).split([len(each) for each in copy]), strict=True):
                part.copy_(each, non_blocking=True)


now = Seams()


@contextmanager
def named(**names: str) -> Iterator[None]:
    """`Seams.named`, also as a decorator."""
    with now.named(**names):
        yield


def powers(size: int) -> list[int]:
    """Cut a size into powers of two, and a rest below a MiB: torch rounds pinned memory up to the next power."""
    whole = [1 << bit for bit in reversed(range(20, size.bit_length())) if size >> bit & 1]
    return [*whole, rest] if (rest := size % (1 << 20)) else whole


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
