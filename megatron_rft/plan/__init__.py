"""Computes the layout, parameters, memory and engines of a recipe on a number of ranks, without torch."""

import sys
from types import ModuleType
from typing import Any

from megatron_rft.config import AnyRecipe, load
from megatron_rft.config.messages import argument
from megatron_rft.config.sections import Count, Positive
from megatron_rft.plan.checks import Plan, check, check_store_is_there, check_writable, make_folder


def plan(recipe: AnyRecipe, nproc: int = 1, gpu_gib: float | None = None, **sections: Any) -> Plan:
    """Check a recipe as a run on `nproc` ranks would, and compute its batch, layout and memory; `print` shows it.

    Args:
        recipe: what `load` takes or has returned.
        nproc: ranks of the whole run.
        gpu_gib: memory of one GPU in GiB, which the run must fit. None: memory is not compared.
        sections: options on top of the recipe, as for `load`.

    Raises:
        ConfigError: an option is wrong, or the run does not fit, with the arithmetic and the fix.
        DataError: a file that the recipe names is missing.
    """
    nproc, gpu_gib = argument("nproc", Count, nproc), argument("gpu_gib", Positive | None, gpu_gib)
    return check(load(recipe, **sections), nproc, gpu_gib=gpu_gib)


class _Callable(ModuleType):
    """`megatron_rft.plan(...)` and this package share their name."""

    __call__ = staticmethod(plan)


sys.modules[__name__].__class__ = _Callable
