"""Lets torch's compiler, DTensor, checkpoints, SymPy, accelerate, TensorBoard and wandb load at first use on a CPU:
a third of the processor time until step 1. transformers, torch and megatron-core import them. transformers also reads
the files of all its models three times, and those of all installed packages: 0.3 s more."""

import contextlib
import gc
import inspect
import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module, metadata
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType, SimpleNamespace, new_class
from typing import Any

from megatron_rft.utils.device import has_cuda_device


def _same(function: Any = None, *args: Any, **options: Any) -> Any:
    """A decorator for the compiler, which is not there."""
    return function or _same


_CACHES = SimpleNamespace(clear_lru_cache=lambda: None, get_legacy_mod_inlinelist=SimpleNamespace(cache_clear=int))
_COMPILER = dict.fromkeys(("allow_in_graph", "assume_constant_result", "disable"), _same)
READ_TWICE = "transformers.utils.import_utils"
_STRATEGIES = "megatron.core.dist_checkpointing.strategies"
_NAMES = {
    "accelerate": "PartialState dispatch_model",
    "accelerate.hooks": "AlignDevicesHook add_hook_to_module",
    "accelerate.utils": "extract_model_from_parallel get_balanced_memory get_max_memory infer_auto_device_map reduce",
    "accelerate.utils.modeling": "clean_device_map get_max_layer_size",
    "huggingface_hub.hf_api": "HfApi RepoFile get_repo_discussions upload_file",
    "megatron.core.distributed.fsdp.mcore_fsdp_adapter": "FullyShardedDataParallel",
    "megatron.core.inference.unified_memory": "UnifiedMemoryUnsupportedError create_unified_mempool",
    "megatron.core.inference_params": "InferenceParams",
    "megatron.core.transformer.fsdp_dtensor_checkpoint": "get_global_unique_param_name handle_experts_in_state_dict",
    "torch._dynamo._trace_wrapped_higher_order_op": "TransformGetItemToIndex",
    "torch.distributed._composable.fsdp": "fully_shard",
    "torch.distributed._tensor": "DTensor distribute_tensor",
    "torch.distributed.fsdp": "CPUOffloadPolicy MixedPrecisionPolicy fully_shard",
    "torch.distributed.tensor": "DTensor",
    "torch.distributed.tensor.placement_types": "Shard",
    "torch.distributions": "constraints",
    "torch.utils.tensorboard": "SummaryWriter",
    "transformers.distributed.sharding_utils": "DtensorShardOperation _dtensor_from_local_like",
    "transformers.distributed.tensor_parallel": "_get_parameter_plan _validate_parallel_plan_styles verify_tp_plan "
    "apply_expert_parallelism apply_tensor_parallelism gather_state_dict_for_save replace_layer_number_by_wildcard "
    "resolve_parallel_plans",
    "transformers.modeling_gguf_pytorch_utils": "load_gguf_checkpoint",
} | dict.fromkeys(
    f"{_STRATEGIES}.filesystem_async {_STRATEGIES}.fully_parallel {_STRATEGIES}.torch torch.distributed.checkpoint "
    "torch.export torch.nn.intrinsic torch.nn.qat torch.nn.quantizable torch.nn.quantized torch.quantization "
    "torch.utils.cpp_extension torch.utils.data wandb".split(),
    "",
)
# Module -> what its names are before it is loaded; None: a `LateName`. Other names load it at once.
LATE: dict[str, dict[str, Any]] = {module: dict.fromkeys(names.split()) for module, names in _NAMES.items()}
LATE["torch._dynamo"] = _COMPILER | {"graph_break": lambda: None, "trace_rules": _CACHES}
AFTER: list[Callable[[], None]] = []  # what to do when a module has been loaded


class LateModule(ModuleType):
    """A module that runs its code when one of its names is used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in LATE[self.__name__]:
            return getattr(load(self), name)
        return LATE[self.__name__][name] or LateName(name, (Exception,), {"__module__": self.__name__})


class LateName(type):
    """A class or function of a late module, which a use loads. It is an exception, so that `except` takes it."""

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Any:
        if bases != (Exception,):  # a subclass is one of the loaded class
            bases = tuple(base.loaded() if isinstance(base, LateName) else base for base in bases)
            return new_class(name, bases, exec_body=lambda body: body.update(namespace))
        return super().__new__(cls, name, bases, namespace)

    def __call__(cls, *args: Any, **named: Any) -> Any:
        return cls.loaded()(*args, **named)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.loaded(), name)

    def __instancecheck__(cls, instance: Any) -> bool:
        return issubclass(type(instance), cls)

    def __subclasscheck__(cls, other: type) -> bool:
        """Before the module is loaded there is no other class of its kind."""
        return not isinstance(sys.modules[cls.__module__], LateModule) and issubclass(other, cls.loaded())

    def loaded(cls) -> Any:
        return getattr(load(sys.modules[cls.__module__]), cls.__name__)


def load(module: ModuleType | None) -> ModuleType | None:
    """Run the code of a late module, after that of its package."""
    if isinstance(module, LateModule):
        load(sys.modules.get(module.__name__.rpartition(".")[0]))
    if isinstance(module, LateModule):  # its package may have loaded it
        module.__class__ = ModuleType
        LATE.update({name: {} for name in LATE if name.startswith(f"{module.__name__}.")})  # its code needs real names
        module.__spec__.loader = module.__loader__ = module.__spec__.loader_state
        module.__loader__.exec_module(module)
        for call in AFTER:
            call()
    return module


_distributions = cache(metadata.packages_distributions)  # reads what each installed distribution says of its files


class _Distributions(Mapping):
    """The distributions of each package; they are read when a package is asked for that has no namesake."""

    def __getitem__(self, package: str) -> list[str]:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return [metadata.distribution(package).name]
        return _distributions()[package]

    __iter__, __len__ = (lambda self: iter(_distributions())), (lambda self: len(_distributions()))


class _Here(Loader):
    """Of a module whose code has run."""

    def __init__(self, module: ModuleType):
        self.module, self.spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec


class _Finder(Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name in (*LATE, READ_TWICE) and (spec := PathFinder.find_spec(name, path)):
            spec.loader, spec.loader_state = self, spec.loader
            return spec
        before = name in sys.modules
        load(sys.modules.get(name.rpartition(".")[0]))  # other modules of a package need its own code
        # That code may have imported `name`. importlib has looked for it before, and would run it a second time.
        return ModuleSpec(name, _Here(sys.modules.pop(name))) if name in sys.modules and not before else None

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
            vars(module)["direct_transformers_import"] = lambda _folder: sys.modules["transformers"]


def lean_import(name: str) -> ModuleType:
    """Import without loading the modules of LATE, then and later, and without looking for garbage in what stays. For a
    module that is there nothing is done: freezing again would keep garbage, such as a process group in a cycle."""
    if name in sys.modules:
        return sys.modules[name]
    if not has_cuda_device() and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    gc.disable()
    # torch asks for the place and module of each operator: to find its text takes 0.2 s, and all modules' paths 0.05 s
    get, inspect.getframeinfo.__defaults__ = inspect.getmodule, (0,)
    inspect.getmodule = lambda x, *a: sys.modules.get(x.f_globals.get("__name__")) if inspect.isframe(x) else get(x, *a)
    try:
        return import_module(name)
    finally:
        inspect.getmodule, inspect.getframeinfo.__defaults__ = get, (1,)
        gc.freeze(), gc.enable()
