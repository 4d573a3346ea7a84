"""A dispatch mode that runs device operations on shapes and reports them to the ledger.

A device tensor is a FakeTensor on "cuda": it has a shape, a dtype and a storage without memory. Operations on host
tensors alone run unchanged. A small device tensor whose values the host may read (indices, lengths, masks, routing) has
a real `shadow` on the host, and so have results that are computed from shadows. Copies of large tensors to the host are
fake host tensors without memory; the ledger counts them as host memory.

A global FakeTensorMode would make host tensors fake as well, but packing reads their values.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork, ProcessGroup
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary, weakref

from megatron_rft.rehearsal.cuda import PINNED
from megatron_rft.rehearsal.ledger import BLOCK, Ledger

aten = torch.ops.aten
SHADOW = 1 << 22  # elements of the largest tensor whose values are kept
FLOAT_SHADOW = 4096  # the same for floating point: lengths and scalars, but no activations
REAL_ON_HOST = 1 << 20  # bytes; a larger copy of a device tensor in low precision has no memory on the host either
NO_TRAFFIC = ("empty", "_unsafe_view", "view", "detach", "alias")


def _mapped(function: Callable, xs: Any) -> Any:
    """Apply a function to what stands in lists, tuples and dictionaries; torch's own takes a tenth of a rehearsal."""
    if isinstance(xs, dict):
        return {name: _mapped(function, x) for name, x in xs.items()}
    return type(xs)(_mapped(function, x) for x in xs) if type(xs) in (list, tuple) else function(xs)


def _leaves(xs: Any) -> list[Any]:
    found: list[Any] = []
    _mapped(found.append, xs)
    return found


def is_fake(x: Any, device: str | None = None) -> bool:
    return isinstance(x, FakeTensor) and (device is None or x.fake_device.type == device)


def _in_the_background(func: Any, args: tuple, kwargs: dict) -> bool:
    """Return whether a copy from or to pinned memory does not make the host wait."""
    if func is aten.copy_.default:
        return (len(args) > 2 and args[2]) and any(x in PINNED for x in args[:2])
    return bool(kwargs.get("non_blocking")) and args[0] in PINNED


class FakeDevice(TorchDispatchMode):
    def __init__(self, ledger: Ledger):
        super().__init__()
        self.ledger, self.fake = ledger, FakeTensorMode(allow_non_fake_inputs=True)
        self.shadows, self.storages = WeakIdKeyDictionary(), WeakIdKeyDictionary()
        ledger.in_backward = lambda: torch._C._current_graph_task_id() != -1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        target = kwargs.get("device")
        target = None if target is None else torch.device(target).type
        if target != "cuda" and FakeTensor not in types:
            return func(*args, **kwargs)
        tensors = [x for x in _leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if func.namespace == "c10d":
            return self._collective(func, args)
        if func is aten._local_scalar_dense.default:
            return self._item(args[0])
        to_host = target == "cpu" or (func is aten.copy_.default and not is_fake(args[0], "cuda"))
        if to_host and any(is_fake(x, "cuda") for x in tensors):
            return self._copy_to_host(func, args, kwargs)
        return self._on_device(func, args, kwargs, tensors, target)

    # ---- reads by the host

    def _item(self, x: torch.Tensor) -> Any:
        """Return the value, or 1 if it is not known: a loss, a norm, a count."""
        self.ledger.wait("item")
        shadow = self.shadows.get(x)
        return shadow.item() if shadow is not None else torch.ones((), dtype=x.dtype).item()

    def _copy_to_host(self, func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
        into = args[0] if func is aten.copy_.default else None
        source = args[0] if into is None else args[1]
        dtype = kwargs.get("dtype") or source.dtype
        if not _in_the_background(func, args, kwargs):
            self.ledger.wait("device to host")
        shadow = self.shadows.get(source)
        if into is not None:
            return into.copy_(shadow) if shadow is not None and not is_fake(into) else into
        if shadow is not None:
            return shadow.to(dtype, copy=True)
        entry, size = self.storages.get(source.untyped_storage()), source.numel() * dtype.itemsize
        low = dtype.itemsize == 2 or (entry and entry[1] == "weights")
        if size > REAL_ON_HOST and low:
            return self.made(lambda: torch.empty(source.shape, dtype=dtype))
        return torch.zeros(source.shape, dtype=dtype)

    # ---- operations

    def _on_device(self, func, args, kwargs, tensors, target):
        self._from_host(func, args, kwargs, tensors, target)
        values = self._values(func, args, kwargs, tensors, target)
        if torch.Tag.dynamic_output_shape in func.tags or func is aten.index.Tensor:
            func, args = self._sized(func, args, values)
            if func is None:
                return _mapped(self._with_shadow, values)
        args, kwargs = _mapped(self._shape_of, (args, kwargs))
        result = self.fake.dispatch(func, (), args, kwargs)
        outputs, known = _leaves(result), _leaves(values)
        for position, out in enumerate(outputs):
            if isinstance(out, FakeTensor):
                self._note(out)
                if values is not None and (not out.is_floating_point() or out.numel() <= FLOAT_SHADOW):
                    self.shadows[out] = known[position]
                elif out in self.shadows and func._schema.is_mutable:
                    del self.shadows[out]
        self._cost(func, args, kwargs, tensors, outputs, result)
        return result

    def _from_host(self, func, args, kwargs, tensors, target):
        """Report the copies of host tensors to the device."""
        if target != "cuda" and not any(is_fake(x, "cuda") for x in tensors):
            return
        sources = [x for x in tensors if not is_fake(x, "cuda") and x.dim()]
        if sources and not _in_the_background(func, args, kwargs):
            self.ledger.wait("host to device")
        for source in sources:
            self.ledger.upload(_bytes(source))
            if func is aten.copy_.default and not (source.dtype == args[0].dtype and source.is_contiguous()):
                self.ledger.temporary(source.numel() * args[0].element_size())  # torch converts it on the host first

    def _values(self, func, args, kwargs, tensors, target):
        """Return the result on the host if all inputs are known and small, else None."""
        fakes = [x for x in tensors if isinstance(x, FakeTensor)]
        known = {id(x): self.shadows.get(x) for x in fakes}
        if any(value is None for value in known.values()) or any(x.numel() > SHADOW for x in tensors):
            return None
        made = func is aten.arange.default or (func is aten.zeros.default and not args[0])
        if not (fakes or made or any(x.dim() for x in tensors)):
            return None
        real_args, real_kwargs = _mapped(lambda x: known.get(id(x), x), (args, kwargs))
        return func(*real_args, **{**real_kwargs, **({"device": "cpu"} if target else {})})

    def _sized(self, func, args, values):
        """Replace an operation whose shape depends on values by one whose shape does not. Return it with its arguments,
        or (None, None) if `values` is the result.

        Raises:
            RuntimeError: the values are not known.
        """
        masked = func is aten.masked_select.default
        indices = [args[1]] if masked else args[1] if func is aten.index.Tensor else None
        if indices is not None and not any(x is not None and x.dtype == torch.bool for x in indices):
            return func, args
        self.ledger.wait(func._schema.name)
        if values is not None:
            return None, None
        if indices is None or any(isinstance(x, FakeTensor) and x not in self.shadows for x in indices):
            raise RuntimeError(f"the shape that {func} gives depends on values that the rehearsal does not know")
        place = self._with_shadow if is_fake(args[0], "cuda") else (lambda x: x)
        indexes: list = []
        for index in indices:
            known = self.shadows[index] if isinstance(index, FakeTensor) else index
            is_mask = known is not None and known.dtype == torch.bool
            indexes += [place(where) for where in known.nonzero(as_tuple=True)] if is_mask else [index]
        return aten.index.Tensor, (args[0], indexes)

    def _with_shadow(self, value: torch.Tensor) -> torch.Tensor:
        out = self.made(lambda: torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda"))
        self.shadows[out] = value
        return out

    def _shape_of(self, x: Any) -> Any:
        """Return a fake tensor for a host tensor, because FakeTensorMode really runs operations on small ones."""
        if not isinstance(x, torch.Tensor) or isinstance(x, FakeTensor):
            return x
        with self.fake:
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)

    def made(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return a fake tensor, which the ledger counts."""
        with self.fake:
            out = make()
        self._note(out)
        return out

    # ---- reports to the ledger

    def _note(self, tensor: FakeTensor) -> None:
        """Report the memory of a storage that is new or has a new size."""
        storage = tensor.untyped_storage()
        memory = self.ledger.memory if is_fake(tensor, "cuda") else self.ledger.host
        size, entry = -(-storage.nbytes() // BLOCK) * BLOCK, self.storages.get(storage)
        if entry is None:
            category = self.ledger.category_now()
            entry = self.storages[storage] = [memory, category, 0]
            weakref.finalize(storage, lambda freed: freed[0].add(freed[1], -freed[2]), entry)
        memory.add(entry[1], size - entry[2])
        entry[2] = size

    def relabel(self, tensors, category: str) -> None:
        for tensor in tensors:
            entry = self.storages.get(tensor.untyped_storage())
            if entry and entry[1] != category:
                entry[0].move(entry[1], category, entry[2])
                entry[1] = category

    def _cost(self, func, args, kwargs, tensors, outputs, result) -> None:
        name = func._schema.name.removeprefix("aten::")
        if func.is_view or func.namespace != "aten" or name.startswith(NO_TRAFFIC):
            return
        touched = {id(x): x for x in [*tensors, *outputs] if isinstance(x, torch.Tensor)}.values()
        if not any(is_fake(x, "cuda") for x in touched):
            return
        count = flop_registry.get(func._overloadpacket)
        flops = count(*args, **kwargs, out_val=result) if count else 0
        self.ledger.kernel(flops, sum(x.numel() * x.element_size() for x in touched))

    # ---- collectives

    def _collective(self, func, args):
        """Count a collective and return at once. All ranks are taken to have this rank's values; exchanges are
        balanced."""
        name = func._schema.name.removeprefix("c10d::").strip("_").removesuffix("_coalesced")
        handle = next(x for x in args if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type()))
        group = ProcessGroup.unbox(handle)
        size = max(sum(_bytes(x) for x in _leaves(part)) for part in args[:2])
        self.ledger.collective(name, _label(group), dist.get_process_group_ranks(group), size)
        if name == "gather":  # gloo gathers into one flat buffer first
            self.ledger.temporary(size)
        if "allgather" in name and (own := self.shadows.get(_leaves(args[1])[0])) is not None:
            for out in _leaves(args[0]):
                self.shadows[out] = own.flatten().repeat(out.numel() // own.numel()).view(out.shape)
        work = FakeWork().boxed()
        return work if len(func._schema.returns) == 1 else (args[0], work)


def _bytes(x: Any) -> int:
    return x.numel() * x.element_size() if isinstance(x, torch.Tensor) else 0


def _label(group: dist.ProcessGroup) -> str:
    """TENSOR_MODEL_PARALLEL_GROUP -> tensor"""
    text = (group.group_desc or "").lower().replace("_parallel", "").replace("_group", "").replace("_", " ")
    names = {"tensor model": "tensor", "pipeline model": "pipeline", "expert model": "expert"}
    names |= {"intra distributed optimizer instance": "optimizer", "default pg": "world", "undefined": "world"}
    return names.get(text, text) or "world"
