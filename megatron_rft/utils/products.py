"""Products of matrices on CPUs whose instructions torch leaves unused. `restore` gives torch its own back.

bf16 below AVX-512 BF16 and AMX: torch multiplies number by number (0.6 GFLOP/s of a core that does 39 in fp32). Here
the factors are multiplied in fp32 and each result is rounded once, as the instructions do it.

fp32 on AMD's CPUs with AVX-512: torch calls MKL, which uses AVX2 there (110 GFLOP/s of a core that does 240). Here
oneDNN multiplies, which torch has for bf16; up to Zen 4, whose AVX-512 has AVX2's rate, where there are many rows.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from megatron_rft.utils.device import cpu_words

BF16 = ("mm", "addmm", "bmm", "baddbmm")  # matmul and linear end in one of them
FP32 = ("mm", "addmm")  # those of attention are too small to gain
SMALL = 1 << 20  # multiplications: below, oneDNN takes as long as MKL or longer
TALL = 512  # rows: the same up to Zen 4, as if they are fewer than the terms of a sum (the gradient of a weight)
# Shapes whose kernels torch and oneDNN keep. Batches of all lengths have ever new ones: 1,024 take 250 MB or more.
FEW_KERNELS = dict.fromkeys(("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"), "64")
_libraries: dict[str, Any] = {}  # as long as one lives, its products replace torch's


def has_instructions() -> bool:
    """Whether torch multiplies bf16 by instructions of this CPU, or without oneDNN, which knows them."""
    import torch

    return not torch.backends.mkldnn.is_available() or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def mkl_is_slow() -> bool:
    """Whether MKL leaves this CPU's AVX-512 unused."""
    import torch

    libraries = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    return libraries and torch.backends.cpu.get_cpu_capability() == "AVX512" and "AuthenticAMD" in cpu_words()


def install_bf16() -> None:
    """Replace torch's products of bf16 on a CPU without instructions for them."""
    if not has_instructions():
        _replace("bf16", BF16, lambda name, product: _rounded_once(product))


def install_fp32() -> None:
    """Replace torch's products of fp32 where MKL is slow."""
    if mkl_is_slow():
        _replace("fp32", FP32, _by_onednn)


def restore(kind: str) -> None:
    _libraries.pop(kind, None)


def _replace(kind: str, names: tuple[str, ...], changed: Callable[[str, Any], Any]) -> None:
    """Once in a process: `changed` takes the name and torch's kernel of a product and returns another kernel."""
    import torch

    if kind in _libraries or not hasattr(torch.library, "get_kernel"):  # torch 2.9
        return
    _libraries[kind] = torch.library.Library("aten", "IMPL")
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    for name in names:
        product = partial(torch.library.get_kernel(f"aten::{name}", "CPU").call_boxed, key)
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # "Overriding a registered kernel"
            _libraries[kind].impl(name, changed(name, product), "CPU")


def _rounded_once(product: Any) -> Any:
    from torch import bfloat16

    def multiply(first: Any, *others: Any, **factors: float) -> Any:
        if first.dtype is not bfloat16:
            return product(first, *others, **factors)
        return product(first.float(), *(each.float() for each in others), **factors).bfloat16()

    return multiply


def _by_onednn(name: str, product: Any) -> Any:
    from torch import float32, ops

    linear = ops.mkldnn._linear_pointwise.default
    zen5 = not cpu_words().isdisjoint(("avx_vnni", "avx512_vp2intersect"))  # or later

    def takes(first: Any, second: Any) -> bool:
        rows, inner = first.shape
        tall = zen5 or rows >= max(TALL, inner)
        return tall and first.dtype is second.dtype is float32 and rows * inner * second.shape[1] >= SMALL

    def mm(first: Any, second: Any) -> Any:
        return linear(first, second.t(), None, "none", [], "") if takes(first, second) else product(first, second)

    def addmm(added: Any, first: Any, second: Any, *, beta: float = 1, alpha: float = 1) -> Any:
        if takes(first, second) and beta == 0:
            return linear(first, second.t(), None, "none", [], "").mul_(alpha)
        if takes(first, second) and added.dim() == 1 and beta == alpha == 1:
            return linear(first, second.t(), added, "none", [], "")
        return product(added, first, second, beta=beta, alpha=alpha)

    return {"mm": mm, "addmm": addmm}[name]
