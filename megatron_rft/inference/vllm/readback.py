"""Reads weights back from a vLLM engine: undoes the layouts of its kernels and joins the shards of its workers.

A matrix that was packed or rounded for its kernel is read through the kernel: as its product with the identity. For
experts the order of packed elements is found by packing the numbers 0, 1, 2, ...
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from vllm.distributed import get_tp_group
from vllm.model_executor.layers import linear
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from megatron_rft.families.tables import family_of
from megatron_rft.families.towers import sees
from megatron_rft.inference.engine import checksum
from megatron_rft.utils.errors import RunFailed

COLUMNS = 256  # columns of a packed matrix that are read at a time


def checksums(model: nn.Module, dtype: torch.dtype) -> dict[str, int | None]:
    """Return the `checksum` of every parameter, in the engine's dtype, by HF name; -1 if its copies differ. None stands
    for a rounded parameter that was compared with the received values when it was loaded, and has not changed since.
    Collective."""
    by_name: dict[str, int | None] = {}
    for name, tensor in read(model):
        value = checksum(tensor.to(dtype))  # the biases of a router are fp32 in any engine
        value = None if value in model.read_back.get(name, ()) else value
        if by_name.setdefault(name, value) != value:
            by_name[name] = -1
    return by_name


def read(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (HF name, unsharded tensor) of every parameter, as the model computes with it.

    Collective over the engine's tensor-parallel workers. A parameter with several copies is yielded once for each: a
    tied output matrix also under its embedding's name, a norm and shared key-value heads for each worker.
    """
    for path, layer in model.named_modules():
        found = read_layer(model, path, layer)
        stacked = isinstance(layer, RoutedExperts) and sees(model.config.get_text_config())
        yield from stack(dict(found)) if stacked else found


def stack(matrices: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors [E, in, out] of all experts of a layer, of which `experts` has named each matrix."""
    path, kinds = min(matrices).rsplit(".", 3)[0], ("gate_proj", "up_proj", "down_proj")
    each = range(len(matrices) // len(kinds))
    gate, up, down = (torch.stack([matrices[f"{path}.{e}.{kind}.weight"] for e in each]).mT for kind in kinds)
    yield f"{path}.gate_up_proj", torch.cat([gate, up], -1)
    yield f"{path}.down_proj", down.contiguous()


@torch.inference_mode()
def read_layer(model: nn.Module, path: str, layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield what `read` yields for one layer."""
    for shard in shards(model, path, layer):
        all_shards = all_gather(shard.values)
        for copy in range(shard.copies):
            whole = torch.cat(all_shards[copy :: shard.copies], shard.dim)[: shard.rows]
            yield shard.names[copy % len(shard.names)], whole


def all_gather(values: Tensor) -> list[Tensor]:
    """Return the tensors of all tensor-parallel workers."""
    group = get_tp_group()
    found = [torch.empty(values.shape).to(values) for _ in range(group.world_size)]
    dist.all_gather(found, values.contiguous(), group=group.device_group)
    return found


@dataclass
class Shard:
    """This worker's part of one or more parameters.

    Of the workers' shards, every `copies`-th one, joined in dimension `dim` and cut to `rows`, is a parameter: shard
    i belongs to copy i % copies. Copies are replicas of one parameter, or parameters with names of their own (experts).
    """

    names: list[str]  # HF names: one for each copy, or one for all
    values: Tensor
    dim: int = 0
    copies: int = 1
    rows: int | None = None  # without padding


def shards(model: nn.Module, path: str, layer: nn.Module) -> Iterator[Shard]:
    if isinstance(layer, RoutedExperts):
        yield from experts(published(model, path).removesuffix(".routed_experts"), layer)
        return
    world = get_tp_group().world_size
    replicas = world if getattr(layer, "disable_tp", False) else 1  # of a vision tower
    for key in parameters(layer):
        values = matrix(layer) if key == "weight" else layer._parameters[key]
        names = hf_names(model, path, key)
        if isinstance(layer, VocabParallelEmbedding):
            if layer in tied(model):
                names = hf_names(model, path.replace("lm_head", "model.embed_tokens"), key)
            yield Shard(names, values, rows=model.config.get_text_config().vocab_size)
        elif len(names) > 1:
            shared = [1, *[layer.num_kv_head_replicas] * 2] if isinstance(layer, linear.QKVParallelLinear) else [1, 1]
            for name, part, copies in zip(names, values.split(layer.output_partition_sizes), shared, strict=True):
                yield Shard([name], part, copies=copies * replicas)
        elif isinstance(layer, linear.RowParallelLinear) and key == "weight":
            yield Shard(names, values, dim=1, copies=replicas)
        else:
            whole = not isinstance(layer, linear.ColumnParallelLinear)
            yield Shard(names, values, copies=world if whole else replicas)


def rounds(layer: nn.Module) -> bool:
    """Return whether the layer's matrix is quantised."""
    return isinstance(layer, linear.LinearBase) and not isinstance(layer.quant_method, linear.UnquantizedLinearMethod)


def parameters(layer: nn.Module) -> list[str]:
    """Return the names of a layer's parameters, without the scales of a quantised layer and without what latent
    attention makes of the matrix that it absorbs."""
    made = ("W_UV", "W_UK_T") if hasattr(layer, "kv_b_proj") else ()
    names = [key for key, value in layer._parameters.items() if value is not None and not key.startswith(made)]
    return [key for key in names if key in ("weight", "bias")] if rounds(layer) else names


def hf_names(model: nn.Module, path: str, key: str) -> list[str]:
    """Return the names of the HF tensors that form a parameter of vLLM."""
    path = published(model, path)
    module = path.rpartition(".")[2]
    packed = {"gate_up_proj": ["gate_proj", "up_proj"]} | getattr(model, "packed_modules_mapping", {})
    parts = packed.get(module, [module])
    return [f"{path.removesuffix(module)}{part}.{key}" for part in parts]


def published(model: nn.Module, path: str) -> str:
    """Return a layer's path in HF's names: a model that reads images has other prefixes in vLLM."""
    config = model.config.get_text_config()
    if not sees(config):
        return path
    family, path = family_of(config), path.removeprefix("language_model.")
    if path.startswith("visual."):
        return path.replace("visual.", family.tower, 1)
    return path.replace("model.", family.prefix, 1)


def layer_hf_names(model: nn.Module, path: str, layer: nn.Module) -> list[str]:
    """Return the names of the HF tensors that form a layer."""
    return [name for key in parameters(layer) for name in hf_names(model, path, key)]


def experts(path: str, layer: RoutedExperts) -> Iterator[Shard]:
    """Yield the shards of experts: each worker has a part of all experts, or, with expert parallelism, its own ones."""
    owners = [list(range(layer.global_num_experts))]
    if layer.use_ep:
        owners = [slots.argsort()[(slots < 0).sum() :].tolist() for slots in all_gather(layer._expert_map)]
    size = layer.moe_config.intermediate_size_per_partition_unpadded
    parts = ("w1", "w3", "w2") if path.endswith(".block_sparse_moe.experts") else ("gate_proj", "up_proj", "down_proj")
    for slot, same in enumerate(zip(*owners, strict=True)):
        gate, up = unpacked(layer, layer.w13_weight[slot]).chunk(2)  # [I, H] each
        down = unpacked(layer, layer.w2_weight[slot])  # [H, I]
        if layer.quant_method.unquantized_backend == UnquantizedMoeBackend.FLASHINFER_CUTLASS:
            gate, up = up, gate
        for name, values, dim in zip(parts, (gate[:size], up[:size], down[:, :size]), (0, 0, 1), strict=True):
            names = [f"{path}.{expert}.{name}.weight" for expert in same]
            yield Shard(names, values, dim, copies=len(owners))


def unpacked(layer: RoutedExperts, weight: Tensor) -> Tensor:
    """Return an expert's matrix [out, in] in its original order."""
    backend = layer.quant_method.unquantized_backend
    if backend in (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.FLASHINFER_CUTLASS):
        return weight
    if backend != UnquantizedMoeBackend.CPU:
        raise RunFailed(
            f"experts' weights cannot be read back from the layout of vLLM's kernels {backend.value}: "
            "set vllm.moe_backend=triton"
        )
    kernel = layer.quant_method.moe_kernel.fused_experts
    if kernel._use_zentorch:
        return weight
    values = torch.empty_like(weight).view(-1)
    values[packing(kernel.isa, weight.dtype, *weight.shape)] = weight.flatten()
    return values.view(weight.shape)


@cache
def packing(isa: str, dtype: torch.dtype, rows: int, columns: int) -> Tensor:
    """Return [rows * columns]: for each packed element, its index in the matrix. The numbers are packed in digits below
    256, which any dtype represents exactly."""
    from vllm._custom_ops import cpu_prepack_moe_weight

    numbers, order, unit = torch.arange(rows * columns), torch.zeros(rows * columns, dtype=torch.long), 1
    while unit < len(numbers):
        digits = (numbers // unit % 256).to(dtype).view(1, rows, columns)
        order += cpu_prepack_moe_weight(digits, isa).view(-1).long() * unit
        unit *= 256
    return order


def matrix(layer: nn.Module) -> Tensor:
    """Return a layer's weight [out, in] as it is used: read through the kernel if that has packed or rounded it."""
    weight = layer.weight
    embedding = isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead)
    if rounds(layer):
        dtype, product = layer.params_dtype, partial(layer.quant_method.apply, layer)
    elif embedding or not hasattr(layer, "cpu_linear"):
        return weight
    else:
        dtype, product = weight.dtype, partial(layer.cpu_linear, weight=weight, bias=None)
    columns = getattr(layer, "input_size_per_partition", layer.input_size)
    products = []
    for some in torch.arange(columns).split(COLUMNS):
        one_hot = torch.zeros(len(some), columns, dtype=dtype, device=weight.device)
        one_hot[torch.arange(len(some)), some] = 1
        products.append(product(one_hot))
    return torch.cat(products).T


def tied(model: nn.Module) -> list[nn.Module]:
    language = getattr(model, "language_model", model)
    tie = getattr(model.config, "tie_word_embeddings", False)
    return [language.lm_head] if tie and hasattr(language, "lm_head") else []
