"""Products of bf16 matrices on CPUs without instructions for them: below AVX-512 BF16 and AMX.

torch multiplies number by number there (0.6 GFLOP/s of a core that does 39 in fp32). Here the factors are multiplied in
fp32 and each result is rounded once, as the instructions do it.
"""

import functools
import warnings
from typing import Any

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")  # matmul and linear end in one of them
_library: list[Any] = []  # as long as it lives, its products replace torch's


def has_instructions() -> bool:
    """Whether torch multiplies bf16 by instructions of this CPU, or without oneDNN, which knows them."""
    import torch

    return not torch.backends.mkldnn.is_available() or torch.ops.mkldnn._is_mkldnn_bf16_supported()


@functools.cache
def install() -> None:
    """Replace torch's products on such a CPU, once in a process."""
    import torch

    if has_instructions() or not hasattr(torch.library, "get_kernel"):  # torch 2.9
        return
    _library.append(torch.library.Library("aten", "IMPL"))
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    for name in PRODUCTS:
        product = functools.partial(torch.library.get_kernel(f"aten::{name}", "CPU").call_boxed, key)
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # "Overriding a registered kernel"
            _library[0].impl(name, _rounded_once(product), "CPU")


def _rounded_once(product: Any) -> Any:
    from torch import bfloat16

    def multiply(first: Any, *others: Any, **factors: float) -> Any:
        if first.dtype is not bfloat16:
            return product(first, *others, **factors)
        return product(first.float(), *(each.float() for each in others), **factors).bfloat16()

    return multiply
