"""Checks weights that vLLM rounds to FP8 as they arrive: compares the weights its kernels use with the received ones.

The stream is in bf16; vLLM rounds a layer when its last tensor has arrived. The layer is then read back through its
kernel (its product with the identity) and compared with the received tensors, element by element.

The error bound. A group's largest weight is scaled to 448, the largest number of e4m3. A normal number has 3 mantissa
bits, so its error is at most 1/16 of itself; below the smallest normal number the error is at most 2^-10 times the
scale, which is 2^-18.8 of the group's largest weight. RELATIVE leaves room for rounding to bf16 before and after,
OF_LARGEST for a scale that was rounded up to a power of two. A layer's largest weight is at least that of any group, so
one bound covers scales per tensor, per channel and per block.
"""

from collections.abc import Iterable, Iterator

from torch import Tensor, nn
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from megatron_rft.inference.engine import checksum
from megatron_rft.inference.vllm.readback import layer_hf_names, read_layer, rounds

RELATIVE, OF_LARGEST, SMALLEST = 1 / 14, 2**-17, 2**-27  # the last: for vLLM's smallest scale
ROWS = 1024  # compared at a time


class Comparison:
    """Compares the weights of an update with the engine's. `read_back`: HF name -> checksums of the rounded weights."""

    def __init__(self, model: nn.Module):
        self.model, self.problem = model, None
        self.read_back: dict[str, set[int]] = {}
        self.waiting: dict[str, dict[str, Tensor]] = {}  # layer -> the received tensors, until it is complete
        self.layers = {path: layer for path, layer in model.named_modules() if rounds(layer)}
        self.owner = {name: path for path, layer in self.layers.items() for name in layer_hf_names(model, path, layer)}

    def watch(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Pass `tensors` on to the model's loading. Keeps those of incomplete layers, as vLLM does."""
        for name, tensor in tensors:
            yield name, tensor
            if name in self.owner:
                self.waiting.setdefault(self.owner[name], {})[name] = tensor
            self._compare_complete()

    def end(self) -> str | None:
        """Compare the last layers. Returns the first problem, or None."""
        self._compare_complete()
        if not self.problem and (left := self.owner.keys() - self.read_back.keys()):
            self.problem = f"{min(left)} was not read back out of the engine ({len(left)} tensors were not)"
        return self.problem

    def _compare_complete(self) -> None:
        for path in [path for path in self.waiting if not get_layerwise_info(self.layers[path]).can_load()]:
            self._compare(path, self.waiting.pop(path))

    def _compare(self, path: str, sent: dict[str, Tensor]) -> None:
        largest = max(tensor.abs().max().item() for tensor in sent.values())
        for name, rounded in read_layer(self.model, path, self.layers[path]):
            self.read_back.setdefault(name, set()).add(checksum(rounded))
            problem = beyond(sent[name], rounded, largest) if name in sent else "never came"
            if problem and not self.problem:
                self.problem = f"{name} in the engine is not what the actor sent, rounded to FP8: {problem}"


def beyond(sent: Tensor, rounded: Tensor, largest: float) -> str | None:
    """Return a message about the first element whose error is larger than the bound, or None. `largest`: the layer's
    largest magnitude."""
    if sent.shape != rounded.shape:
        return f"its shape is {tuple(rounded.shape)}"
    for exact, actual in zip(sent.split(ROWS), rounded.split(ROWS), strict=True):
        exact, actual = exact.to(actual.device).float(), actual.float()
        error, allowed = (actual - exact).abs(), exact.abs() * RELATIVE + (largest * OF_LARGEST + SMALLEST)
        if not (wrong := ~(error <= allowed)).any():  # NaN is wrong
            continue
        first = tuple(wrong.nonzero()[0].tolist())
        return f"{exact[first]:.6g} became {actual[first]:.6g} (the first of {int(wrong.sum())} such elements)"
    return None
