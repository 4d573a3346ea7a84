"""Lets megatron-core run on a host without CUDA (gloo).

megatron-core names its device in four ways: `torch.cuda.current_device()`, `device="cuda"` (with `pin_memory`) in a
factory call, `Tensor.cuda()`, and a comparison with `Tensor.type()`. megatron.core's modules get a separate view of
`torch` in which the first two mean the CPU; torch itself and other libraries keep the real ones. (Wrapping
`torch.empty` and the others globally would break `with torch.device(...)`, which compares functions by identity:
transformers would leave its rotary buffers uninitialised.)

Where megatron-core has an option for such hosts, `model.transformer_config` sets it instead.
"""

import functools
import importlib
import sys
import types

import torch

from megatron_rft.utils import late_imports

# They import all modules that name the device; imported here so that only late ones are first imported after `install`.
USED = ("models.gpt.gpt_layer_specs", "optimizer", "distributed", "pipeline_parallel", "tensor_parallel")
STRATEGIES = ("dist_checkpointing.strategies.torch", "dist_checkpointing.strategies.fully_parallel")
FACTORIES = ("empty", "empty_like", "zeros", "ones", "tensor")


class _View(types.ModuleType):
    """A view of a module with some attributes replaced."""

    def __init__(self, module: types.ModuleType, **replaced):
        super().__init__(module.__name__)
        self.__dict__.update(replaced, _module=module)

    def __getattr__(self, name: str):
        return getattr(self._module, name)


def _on_cpu(factory):
    """Wrap `factory` so that device="cuda" means the CPU and `pin_memory` is ignored."""

    @functools.wraps(factory)
    def call(*args, **kwargs):
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return call


def _type(tensor, *args, plain=torch.Tensor.type, **kwargs):
    name = plain(tensor, *args, **kwargs)  # megatron-core's optimizers compare it with 'torch.cuda.FloatTensor'
    return name.replace("torch.", "torch.cuda.", 1) if isinstance(name, str) else name


def redirect() -> None:
    """Let megatron-core's modules compute on the CPU."""
    torch.Tensor.cuda, torch.Tensor.type = lambda tensor, *args, **kwargs: tensor, _type
    compiler, torch.compile = torch.compile, lambda function: function  # nothing is compiled on the CPU
    for name in (*USED, *STRATEGIES):
        importlib.import_module(f"megatron.core.{name}")
    torch.compile = compiler
    _redirect_torch()
    late_imports.AFTER.append(_redirect_torch)
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    random.get_cuda_rng_tracker(inference_rng_tracker=True)  # a tracker without states: fork() is a null context
    # activation recompute saves and restores these, and separately the CPU generator's state
    random._get_cuda_rng_state = random._set_cuda_rng_state = lambda *args, **kwargs: None
    _moe_without_streams()


def _redirect_torch() -> None:
    cuda = _View(
        torch.cuda,
        current_device=lambda: torch.device("cpu"),
        synchronize=lambda device=None: None,
        current_stream=lambda device=None: None,
    )
    view = _View(torch, **vars(torch) | {name: _on_cpu(getattr(torch, name)) for name in FACTORIES} | {"cuda": cuda})
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core.") and vars(module).get("torch") is torch:
            module.torch = view


def _moe_without_streams() -> None:
    from megatron.core.transformer.moe import token_dispatcher

    dispatcher = token_dispatcher.MoEAlltoAllTokenDispatcher
    dispatcher.cuda_dtoh_stream = "none"  # any value, so that no torch.cuda.Stream is created

    def splits_to_host(self, point, tokens_per_expert=None):
        if not self.drop_and_pad and point == self.cuda_dtoh_point:
            for name in ("input_splits", "output_splits", "output_splits_tp"):
                if torch.is_tensor(getattr(self, name)):
                    setattr(self, name, getattr(self, name).numpy())
        return tokens_per_expert

    dispatcher._maybe_dtoh_and_synchronize = splits_to_host
