"""Weights that vLLM rounds to FP8 as they arrive: what its kernels compute with, held against what came.

The stream is in bf16; vLLM rounds a layer when its last tensor is there. The layer is then read back through its kernel
(its product with the identity) and compared with the tensors that it was made of, element by element.

The bound. With a group's largest weight scaled to the largest number of e4m3, 448, a weight is off by at most half a
unit in the last of its 3 bits, 1/16 of itself, or, below the smallest normal number, by 2^-10 of the scale, which is
2^-18.8 of the group's largest. RELATIVE leaves room for a rounding to bf16 before and after, OF_LARGEST for a scale
that was rounded up to a power of two. A layer's largest weight is no less than any of its groups', so that one bound
serves scales per tensor, per channel and per block.
"""

from collections.abc import Callable, Iterable, Iterator

from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from megatron_rft.inference.engine import checksum

RELATIVE, OF_LARGEST, SMALLEST = 1 / 14, 2**-17, 2**-27  # the last: of vLLM's least scale
ROWS = 1024  # compared at a time

Read = Callable[[str, nn.Module], Iterable[tuple[str, Tensor]]]  # (path, layer) -> (HF name, tensor) as it is held


def rounds(layer: nn.Module) -> bool:
    """Whether this layer's matrix is not held as it came."""
    return isinstance(layer, LinearBase) and not isinstance(layer.quant_method, UnquantizedLinearMethod)


class Comparison:
    """Of one update of `model`'s weights. `read_back`: checksums of what the engine made of them."""

    def __init__(self, model: nn.Module, names: Callable[[str, nn.Module], list[str]], read: Read):
        """`names(path, layer)`: of the HF tensors that the layer is made of."""
        self.read, self.problem = read, None
        self.read_back: dict[str, set[int]] = {}
        self.waiting: dict[str, dict[str, Tensor]] = {}  # layer -> what came of it, until it is complete
        self.layers = {path: layer for path, layer in model.named_modules() if rounds(layer)}
        self.owner = {name: path for path, layer in self.layers.items() for name in names(path, layer)}

    def watch(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Passes `tensors` on to the model's loading. Those of layers that are not complete are kept until then, as
        vLLM keeps them."""
        for name, tensor in tensors:
            yield name, tensor
            if name in self.owner:
                self.waiting.setdefault(self.owner[name], {})[name] = tensor
            self._compare_complete()

    def end(self) -> str | None:
        """The first problem."""
        self._compare_complete()
        if not self.problem and (left := self.owner.keys() - self.read_back.keys()):
            self.problem = f"{min(left)} was not read back out of the engine ({len(left)} tensors were not)"
        return self.problem

    def _compare_complete(self) -> None:
        for path in [path for path in self.waiting if not get_layerwise_info(self.layers[path]).can_load()]:
            self._compare(path, self.waiting.pop(path))

    def _compare(self, path: str, sent: dict[str, Tensor]) -> None:
        largest = max(tensor.abs().max().item() for tensor in sent.values())
        for name, held in self.read(path, self.layers[path]):
            self.read_back.setdefault(name, set()).add(checksum(held))
            problem = beyond(sent[name], held, largest) if name in sent else "never came"
            if problem and not self.problem:
                self.problem = f"{name} in the engine is not what the actor sent, rounded to FP8: {problem}"


def beyond(sent: Tensor, held: Tensor, largest: float) -> str | None:
    """Where `held` is further from `sent` than rounding explains. `largest`: magnitude in all of the layer."""
    if sent.shape != held.shape:
        return f"its shape is {tuple(held.shape)}"
    for some, rounded in zip(sent.split(ROWS), held.split(ROWS), strict=True):
        some, rounded = some.to(rounded.device).float(), rounded.float()
        error, allowed = (rounded - some).abs(), some.abs() * RELATIVE + (largest * OF_LARGEST + SMALLEST)
        if not (wrong := ~(error <= allowed)).any():  # NaN is wrong
            continue
        first = tuple(wrong.nonzero()[0].tolist())
        return f"{some[first]:.6g} became {rounded[first]:.6g} (of {int(wrong.sum())} such elements the first)"
    return None
