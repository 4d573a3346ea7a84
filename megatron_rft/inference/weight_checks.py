"""Checks a stream of weights for every engine: each parameter comes once, with its shape and finite values."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor


class WeightValidator:
    """Checks the tensors of a stream, also against the last accepted stream."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], model_type: str):
        """`shapes`: the HF name and shape of every tensor that a stream must have."""
        self.shapes, self.model_type = shapes, model_type
        self.before: dict[str, tuple[torch.dtype | None, bool]] = {}  # name -> dtype, whether it was all zero
        self._now: dict[str, tuple[torch.dtype, bool]] = {}
        self.refused: str | None = None  # the first problem of a tensor of the stream

    def checked(self, stream: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Begin a stream. Yields its tensors without those that are refused."""
        self._now, self.refused = {}, None

        def passing() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in stream:
                if problem := self._problem(name, tensor):
                    self.refused = self.refused or problem
                else:
                    yield name, tensor

        return passing()

    def _problem(self, name: str, tensor: Tensor) -> str | None:
        """Return the problem of the next tensor of the stream, or None. Reads its values once."""
        shape = self.shapes.get(name)
        if shape is None:
            return f"{name} is no tensor of this {self.model_type} model"
        if name in self._now:
            return f"{name} came twice"
        if tensor.shape != shape:
            return f"{name} has shape {tuple(tensor.shape)}, the engine's has {tuple(shape)}"
        dtype, was_zero = self.before.get(name, (None, True))
        if not tensor.dtype.is_floating_point or dtype not in (None, tensor.dtype):
            before = f"; it was {dtype}" if dtype else ", which no weight is"
            return f"{name} is {tensor.dtype}{before}"
        least, most = torch.stack(torch.aminmax(tensor.detach())).tolist()  # one wait for the device
        if not abs(least) + abs(most) < float("inf"):  # NaN included
            return f"{name} has {int((~tensor.isfinite()).sum())} non-finite values"
        if least == most == 0 and not was_zero:
            return f"{name} is all zero, and was not before"
        self._now[name] = (tensor.dtype, least == most == 0)
        return None

    def missing(self) -> str | None:
        """Return the problem that tensors are missing at the end of the stream, or None."""
        names = [name for name in self.shapes if name not in self._now]
        return f"{names[0]} is missing ({len(names)} of {len(self.shapes)} tensors are)" if names else None

    def accept(self) -> None:
        """Accept the stream: the next one is compared with it."""
        self.before = self._now
