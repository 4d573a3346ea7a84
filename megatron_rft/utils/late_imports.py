"""Lets torch's compiler, SymPy, TensorBoard and wandb load at their first use on a CPU, where nothing is compiled:
three of ten seconds of processor time until step 1. transformers, torch and megatron-core import them. transformers
also reads the files of all its models twice, and those of all installed packages: 0.3 s more."""

import contextlib
import gc
import inspect
import sys
from collections.abc import Mapping
from functools import cache
from importlib import import_module, metadata
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType, SimpleNamespace
from typing import Any

from megatron_rft.utils.device import has_cuda_device


def _same(function: Any = None, *args: Any, **options: Any) -> Any:
    """A decorator for the compiler, which is not there."""
    return function or _same


# Module -> what its names are before it is loaded; None: what loads it when it is called. Other names load it at once.
_CACHES = SimpleNamespace(clear_lru_cache=lambda: None, get_legacy_mod_inlinelist=SimpleNamespace(cache_clear=int))
_COMPILER = dict.fromkeys(("allow_in_graph", "assume_constant_result", "disable"), _same)
_SYMBOLS = ("guard_or_false", "statically_known_true", "GuardOnDataDependentSymNode")
READ_TWICE = "transformers.utils.import_utils"
LATE: dict[str, dict[str, Any]] = {
    "megatron.core.inference.unified_memory": {"create_unified_mempool": None, "UnifiedMemoryUnsupportedError": None},
    "torch._dynamo": _COMPILER | {"graph_break": lambda: None, "trace_rules": _CACHES},
    "torch._dynamo._trace_wrapped_higher_order_op": {"TransformGetItemToIndex": None},
    "torch.fx.experimental.symbolic_shapes": dict.fromkeys(_SYMBOLS),
    "torch.utils.cpp_extension": {},
    "torch.utils.tensorboard": {"SummaryWriter": None},
    "wandb": {},
}


class LateModule(ModuleType):
    """A module that runs its code when one of its names is used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in LATE[self.__name__]:
            return getattr(load(self), name)
        # An exception, so that `except` takes it.
        call = {"__new__": lambda _, *args, **named: getattr(load(self), name)(*args, **named)}
        return LATE[self.__name__][name] or type(name, (Exception,), call)


def load(module: ModuleType | None) -> ModuleType | None:
    """Run the code of a late module, after that of its package."""
    if isinstance(module, LateModule):
        load(sys.modules.get(module.__name__.rpartition(".")[0]))
    if isinstance(module, LateModule):  # its package may have loaded it
        module.__class__ = ModuleType
        module.__spec__.loader = module.__loader__ = module.__spec__.loader_state
        module.__loader__.exec_module(module)
    return module


_distributions = cache(metadata.packages_distributions)  # reads what each installed distribution says of its files


class _Distributions(Mapping):
    """The distributions of each package; they are read when a package is asked for that has no namesake."""

    def __getitem__(self, package: str) -> list[str]:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return [metadata.distribution(package).name]
        return _distributions()[package]

    __iter__, __len__ = (lambda self: iter(_distributions())), (lambda self: len(_distributions()))


class _Finder(Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in (*LATE, READ_TWICE) or not (spec := PathFinder.find_spec(name, path)):
            load(sys.modules.get(name.rpartition(".")[0]))  # other modules of a package need its own code
            return None
        spec.loader, spec.loader_state = self, spec.loader
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return LateModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """The code of a late module runs later."""
        if module.__name__ == READ_TWICE:
            metadata.packages_distributions = _Distributions
            load(module)
            metadata.packages_distributions = _distributions.__wrapped__
            vars(module)["create_import_structure_from_path"] = cache(module.create_import_structure_from_path)
            names = module.fetch__all__  # it splits a whole file into lines, for the last that begins with __all__
            vars(module)["fetch__all__"] = lambda text: names(text[text.rfind("\n__all__") + 1 :])


def lean_import(name: str) -> ModuleType:
    """Import without loading the modules of LATE, then and later, and without looking for garbage in what stays."""
    if not has_cuda_device() and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    gc.disable()
    inspect.getframeinfo.__defaults__ = (0,)  # torch asks for the line of each operator; the text takes 0.2 s to find
    try:
        return import_module(name)
    finally:
        inspect.getframeinfo.__defaults__ = (1,)
        gc.freeze(), gc.enable()
