"""Answers torch.cuda's functions as on a node of GPUs. Call `install` before the package's other parts are imported,
because they patch megatron-core on hosts without GPUs."""

import sys
import types
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.attention.bias
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary

from megatron_rft.rehearsal.ledger import Ledger

aten = torch.ops.aten
ABSENT = ("transformer_engine", "apex", "wandb")  # their kernels cannot run on shapes; torch's own spec replaces them

PINNED = WeakIdKeyDictionary()  # host tensors that a GPU copies without the host


class DeviceStream:
    """A stream or an event (or its context) of a device that has no work."""

    ledger: Ledger

    def __init__(self, *_: Any, **__: Any): ...

    def __enter__(self) -> "DeviceStream":
        return self

    def __exit__(self, *_: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name == "synchronize":
            self.ledger.wait("stream or event")
        return lambda *_, **__: DeviceStream()


def install(ledger: Ledger) -> None:
    for name in ABSENT:
        sys.modules[name] = None
    DeviceStream.ledger = ledger
    _answer(ledger)
    _keep_operations_visible()
    _read_through_the_mode()
    _processes(ledger)


def _nothing(*_: Any, **__: Any) -> None: ...


def _answer(ledger: Ledger) -> None:
    """Replace torch.cuda's functions."""
    d = ledger.device
    facts = {"name": d.name, "major": 9, "minor": 0, "total_memory": int(d.memory), "multi_processor_count": 132}
    properties = types.SimpleNamespace(**facts)
    replaced = {
        **dict.fromkeys(("_lazy_init", "set_device", "empty_cache", "manual_seed", "set_rng_state"), _nothing),
        **dict.fromkeys(("is_available", "is_initialized"), lambda: True),
        **dict.fromkeys(("current_stream", "default_stream", "stream", "Stream", "Event"), DeviceStream),
        "current_device": lambda: 0,
        "device_count": lambda: ledger.node,
        "synchronize": lambda *_: ledger.wait("torch.cuda.synchronize"),
        "get_device_capability": lambda *_: (9, 0),
        "get_device_properties": lambda *_: properties,
        "get_device_name": lambda *_: d.name,
        "mem_get_info": lambda *_: (int(d.usable), int(d.memory)),
        "get_rng_state": lambda *_, **__: torch.Generator().get_state(),
        "default_generators": (torch.Generator(),) * ledger.node,
    }
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)
    torch.cuda.random.get_rng_state = torch.cuda.get_rng_state
    torch.Tensor.record_stream = _nothing
    torch.Tensor.pin_memory = pin_memory
    fake_tensor.init_gpu_context = _nothing
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") makes a host tensor and moves it


def pin_memory(self: torch.Tensor, *_: Any) -> torch.Tensor:
    copy = self.detach()
    PINNED[copy] = True
    return copy


def _keep_operations_visible() -> None:
    """Replace compiled functions, which hide their operations from the mode, and attention, which has no implementation
    on "cuda" here."""
    torch.compile = lambda model=None, **_: model or (lambda function: function)
    torch.nn.functional.scaled_dot_product_attention = attention
    torch.nn.functional.rms_norm = rms_norm
    torch.nn.attention.bias.causal_lower_right = LowerRight
    # Module.bfloat16() calls it; a real swap raises "Cannot swap t1 because it has weakref".
    torch.utils.swap_tensors = lambda one, other: setattr(one, "data", other.data)


class LowerRight:
    """Replaces torch's bias of this name, a tensor that cannot be created in a dispatch mode."""

    def __init__(self, queries: int, keys: int): ...


def attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """Call the kernel that CUDA would choose: flash attention without a mask of values, else the memory-efficient one,
    which takes equal numbers of heads."""
    lower_right = isinstance(attn_mask, LowerRight)
    if attn_mask is None or lower_right:
        causal = is_causal or lower_right
        return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, causal, False, scale=scale)[0]
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    bias = attn_mask
    if attn_mask.dtype == torch.bool:
        bias = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill(~attn_mask, float("-inf"))
    bias = bias.expand(q.shape[0], q.shape[1], *bias.shape[-2:])
    return aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, dropout_p, is_causal, scale=scale)[0]


class FusedRMSNorm(torch.autograd.Function):
    """CUDA's fused kernel, which keeps its input and one number per row. A CPU build of torch computes and keeps fp32
    copies instead."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out, rows = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(x, weight, rows)
        DeviceStream.ledger.kernel(0.0, 2.0 * x.numel() * x.element_size())
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight, _ = ctx.saved_tensors
        DeviceStream.ledger.kernel(0.0, 3.0 * x.numel() * x.element_size())
        return torch.empty_like(x), torch.empty_like(weight)


def rms_norm(x: torch.Tensor, shape: Any, weight: torch.Tensor, eps: float | None = None) -> torch.Tensor:
    return FusedRMSNorm.apply(x, weight)


def _read_through_the_mode() -> None:
    """Replace the functions that read a tensor's values without any dispatch mode."""
    plain_tensor = torch.tensor

    def tensor(data: Any, **options: Any) -> torch.Tensor:
        return plain_tensor(tree_map(lambda x: x.item() if isinstance(x, FakeTensor) else x, data), **options)

    torch.tensor = tensor
    FakeTensor.tolist = lambda self: self.cpu().tolist()  # one copy; its own reads element by element
    FakeTensor.data_ptr = lambda self: self.untyped_storage()._cdata + self.storage_offset() * self.element_size()


def _processes(ledger: Ledger) -> None:
    """Let one process stand for all: every group is torch's fake one, and other ranks send what this rank sends."""
    plain_group = dist.new_group

    def new_group(*args: Any, **kwargs: Any) -> dist.ProcessGroup:
        return plain_group(*args, **{**kwargs, "backend": "fake"})  # megatron-core asks for gloo too

    def all_gather_object(found: list, own: Any, group: dist.ProcessGroup | None = None) -> None:
        ledger.wait("all_gather_object")
        found[:] = [own or {"loss": 1.0}] * len(found)  # an earlier stage gets a loss from the last

    def broadcast_object_list(*_: Any, **__: Any) -> None:
        ledger.wait("broadcast_object_list")

    for function in (new_group, all_gather_object, broadcast_object_list):
        setattr(dist, function.__name__, function)
