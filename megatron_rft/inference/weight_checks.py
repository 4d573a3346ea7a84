"""What every engine asks of a stream of weights: each parameter of the model once, of its shape, with sound values."""

from collections.abc import Mapping

import torch
from torch import Tensor


class WeightValidator:
    """Looks at the tensors of one stream after another, and remembers of each what the next one is held against."""

    def __init__(self, shapes: Mapping[str, torch.Size], model_type: str):
        """`shapes`: every HF name that a stream must have, and its shape."""
        self.shapes, self.model_type = shapes, model_type
        self.before: dict[str, tuple[torch.dtype | None, bool]] = {}  # name -> dtype, whether it was all zero
        self._now: dict[str, tuple[torch.dtype, bool]] = {}

    def begin(self) -> None:
        self._now = {}

    def problem(self, name: str, tensor: Tensor) -> str | None:
        """What is wrong with the next tensor of the stream, or None. One pass over its values."""
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
        least, most = (each.item() for each in torch.aminmax(tensor.detach()))
        if not abs(least) + abs(most) < float("inf"):  # NaN included
            return f"{name} has {int((~tensor.isfinite()).sum())} non-finite values"
        if least == most == 0 and not was_zero:
            return f"{name} is all zero, and was not before"
        self._now[name] = (tensor.dtype, least == most == 0)
        return None

    def missing(self) -> str | None:
        """What never came."""
        names = [name for name in self.shapes if name not in self._now]
        return f"{names[0]} is missing ({len(names)} of {len(self.shapes)} tensors are)" if names else None

    def accept(self) -> None:
        """The stream was good: the next one is held against it."""
        self.before = self._now
