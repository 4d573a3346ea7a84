"""Real numbers on the pretended CUDA machine, whose device memory is host memory.

A torch operator on "cuda" tensors is computed by the CPU's kernel on the same memory. Kernels that are no operator of
torch (Transformer Engine's, vLLM's, Triton's) do nothing. `install` covers this thread and every thread started later;
autograd carries the mode into its own.
"""

import os
import threading

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten, CPU = torch.ops.aten, torch.device("cpu")
# Only memory and views: CUDA's own code does these.
MEMORY = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.resize_.default,
    aten.set_.source_Storage,
    aten.set_.source_Storage_storage_offset,
    aten.set_.source_Tensor,
    aten.record_stream.default,
    aten._pin_memory.default,
    aten.is_pinned.default,
    aten.lift_fresh.default,
}


def on_host(tensor):
    """The same memory as a CPU tensor."""
    if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cuda":
        return tensor
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0 or storage.data_ptr() == 0:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    memory = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), CPU, storage.nbytes())
    with torch._C._DisableTorchDispatch():
        empty = torch.empty(0, dtype=tensor.dtype)
        return empty.set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())


def on_device(tensor, device):
    """A new tensor on the device with these numbers."""
    if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cpu":
        return tensor
    with torch._C._DisableTorchDispatch():
        copy = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
        if tensor.numel():
            on_host(copy).copy_(tensor)
    return copy


def rms_norm(x, shape, weight, eps):
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + (torch.finfo(x.dtype).eps if eps is None else eps))
    normal = wide * scale
    return (normal if weight is None else normal * weight.float()).to(x.dtype), scale


def rms_norm_backward(grad, x, shape, scale, weight, mask):
    wide, normal = grad.float() * (1 if weight is None else weight.float()), x.float() * scale
    into_x = scale * (wide - normal * (wide * normal).mean(-1, keepdim=True))
    into_weight = None
    if weight is not None and mask[1]:
        into_weight = (grad.float() * normal).flatten(0, -2).sum(0).to(x.dtype)
    return into_x.to(x.dtype), into_weight


WRITTEN_HERE = {  # operators that CUDA has and the CPU does not
    aten._fused_rms_norm.default: rms_norm,
    aten._fused_rms_norm_backward.default: rms_norm_backward,
}


class ComputedByTheHost(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.is_view and _made_of_others(func):  # under inference_mode they come here whole: `to` copies or not
            with self:
                return func.decompose(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        there = [tensor for tensor in tensors if tensor.device.type == "cuda"]
        wanted = kwargs.get("device")
        to_device = wanted is not None and torch.device(wanted).type == "cuda"
        if not (there or to_device) or not _ours(func, tensors):
            return func(*args, **kwargs)
        device = there[0].device if there else torch.device("cuda", torch.cuda.current_device())
        stays = to_device or (there and wanted is None)
        host_args, host_kwargs = tree_map(on_host, (args, _for_host(func, kwargs)))
        result = WRITTEN_HERE.get(func, func)(*host_args, **host_kwargs)
        written = _written(func, args, kwargs, host_args, host_kwargs)
        if func is aten._to_copy.default and not stays:
            return result.clone() if any(result is each for each in host_args) else result

        def given_back(each):
            if id(each) in written:
                return written[id(each)]
            return on_device(each, device) if stays else each

        return tree_map(given_back, result)


def _ours(func, tensors) -> bool:
    """Operators of torch itself on plain tensors with memory."""
    plain = all(type(each) in (torch.Tensor, torch.nn.Parameter) and each.device.type != "meta" for each in tensors)
    return plain and func not in MEMORY and func.namespace in ("aten", "prims") and not func.is_view


def _made_of_others(func) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _for_host(func, kwargs: dict) -> dict:
    changed = dict(kwargs)
    if changed.get("device") is not None:
        changed["device"] = CPU
    if func is aten._to_copy.default:
        changed.pop("pin_memory", None)
    generator = changed.get("generator")
    if generator is not None and generator.device.type == "cuda":
        changed["generator"] = None
    return changed


def _written(func, args, kwargs, host_args, host_kwargs) -> dict:
    """id of the host's view -> the tensor of the device that it stands for, of arguments that `func` writes to."""
    found = {}
    for place, argument in enumerate(func._schema.arguments):
        if not (argument.alias_info and argument.alias_info.is_write):
            continue
        ours = host_args[place] if place < len(host_args) else host_kwargs.get(argument.name)
        theirs = args[place] if place < len(args) else kwargs.get(argument.name)
        for host, device in zip(tree_leaves(ours), tree_leaves(theirs), strict=True):
            if not isinstance(host, torch.Tensor):
                continue
            found[id(host)] = device
            if host.shape != device.shape and device.device.type == "cuda":  # out= that grew
                with torch._C._DisableTorchDispatch():
                    device.resize_(host.shape)
                    on_host(device).copy_(host)
    return found


def install() -> None:
    if not torch.cuda.is_available():
        return
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    for kernel in ("flash", "mem_efficient", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(False)
    _print_from_the_host()
    _make_biases_without_a_mode()
    _cover_threads()
    ComputedByTheHost().__enter__()


def _cover_threads() -> None:
    """A mode is one thread's: each new thread enters its own."""
    begin = threading.Thread._bootstrap_inner

    def begin_with_mode(thread):
        with ComputedByTheHost():
            begin(thread)

    threading.Thread._bootstrap_inner = begin_with_mode


def _print_from_the_host() -> None:
    """torch prints outside of every mode."""
    plain = torch._tensor_str._str

    def printed(tensor, **options):
        ours = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "cuda"
        return plain(on_host(tensor.detach()) if ours else tensor, **options)

    torch._tensor_str._str = printed


def _make_biases_without_a_mode() -> None:
    """torch's constructor of a subclass without data of its own fails inside of every mode."""
    from torch.nn.attention.bias import CausalBias

    def make(kind, *_):
        with torch._C._DisableTorchDispatch():
            return torch.Tensor.__new__(kind)

    CausalBias.__new__ = make
