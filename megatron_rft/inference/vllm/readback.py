"""Weights as a vLLM engine holds them: out of the layouts of its kernels, and whole out of its workers' parts.

A matrix that was packed or rounded for its kernel is read through the kernel: as its product with the identity. Experts
have no such product; the order into which their kernel's packing puts numbers is known by letting it pack 0, 1, 2, ...
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from megatron_rft.inference.engine import checksum
from megatron_rft.inference.vllm.fp8 import rounds
from megatron_rft.utils.errors import RunFailed

COLUMNS = 256  # of a packed matrix that are read back at a time


def checksums(model: nn.Module) -> dict[str, int | None]:
    """HF name -> `checksum` of every parameter, -1 where copies of one differ. None: it is rounded, was compared with
    what came when that was loaded, and has not changed since. Collective, as `held` is."""
    found: dict[str, int | None] = {}
    for name, tensor in held(model):
        value = checksum(tensor)
        value = None if value in model.read_back.get(name, ()) else value
        if found.setdefault(name, value) != value:
            found[name] = -1
    return found


def held(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(HF name, tensor) of every parameter, whole, as the model computes with it.

    All tensor-parallel workers of the engine ask together. What is held more than once comes as often: a tied output
    matrix, again under its embedding's name; a norm, by each worker; heads of keys and values that workers share.
    """
    for path, layer in model.named_modules():
        yield from held_by(model, path, layer)


@torch.inference_mode()
def held_by(model: nn.Module, path: str, layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """`held`, of one layer."""
    for piece in pieces(model, path, layer):
        everyone = gathered(piece.values)
        for copy in range(piece.copies):
            whole = torch.cat(everyone[copy :: piece.copies], piece.dim)[: piece.rows]
            yield piece.names[copy % len(piece.names)], whole


def gathered(values: Tensor) -> list[Tensor]:
    """Every worker's."""
    group = get_tp_group()
    everyone = [torch.empty(values.shape).to(values) for _ in range(group.world_size)]
    dist.all_gather(everyone, values.contiguous(), group=group.device_group)
    return everyone


@dataclass
class Piece:
    """This worker's of a parameter. `copies` workers in a row have one of their own, or the same: theirs and those of
    the others, joined in dimension `dim`, are the parameter and, beyond `rows`, padding."""

    names: list[str]  # HF's: of each copy, or of all
    values: Tensor
    dim: int = 0
    copies: int = 1
    rows: int | None = None


def pieces(model: nn.Module, path: str, layer: nn.Module) -> Iterator[Piece]:
    if isinstance(layer, RoutedExperts):
        yield from experts(path.removesuffix(".routed_experts"), layer)
        return
    for key in parameters(layer):
        values = matrix(layer) if key == "weight" else layer._parameters[key]
        names = hf_names(model, path, key)
        if isinstance(layer, VocabParallelEmbedding):
            name = "model.embed_tokens" if layer in tied(model) else path
            yield Piece([f"{name}.{key}"], values, rows=model.config.vocab_size)
        elif len(names) > 1:
            shared = [1, *[layer.num_kv_head_replicas] * 2] if isinstance(layer, QKVParallelLinear) else [1, 1]
            for name, part, copies in zip(names, values.split(layer.output_partition_sizes), shared, strict=True):
                yield Piece([name], part, copies=copies)
        elif isinstance(layer, RowParallelLinear) and key == "weight":
            yield Piece(names, values, dim=1)
        else:
            whole = not isinstance(layer, ColumnParallelLinear)
            yield Piece(names, values, copies=get_tp_group().world_size if whole else 1)


def parameters(layer: nn.Module) -> list[str]:
    """Names of a layer's own. A layer that rounds has scales as well."""
    there = [key for key, value in layer._parameters.items() if value is not None]
    return [key for key in there if key in ("weight", "bias")] if rounds(layer) else there


def hf_names(model: nn.Module, path: str, key: str) -> list[str]:
    """Of what a parameter of vLLM is made of."""
    own = path.rpartition(".")[2]
    parts = getattr(model, "packed_modules_mapping", {}).get(own, [own])
    return [f"{path.removesuffix(own)}{part}.{key}" for part in parts]


def made_of(model: nn.Module, path: str, layer: nn.Module) -> list[str]:
    return [name for key in parameters(layer) for name in hf_names(model, path, key)]


def experts(path: str, layer: RoutedExperts) -> Iterator[Piece]:
    """Of all experts the parts that each worker has, or of each worker its own experts."""
    owners = [list(range(layer.global_num_experts))]
    if layer.use_ep:
        owners = [places.argsort()[(places < 0).sum() :].tolist() for places in gathered(layer._expert_map)]
    size = layer.moe_config.intermediate_size_per_partition_unpadded
    for slot, same in enumerate(zip(*owners, strict=True)):
        gate, up = unpacked(layer, layer.w13_weight[slot]).chunk(2)  # [I, H] each
        down = unpacked(layer, layer.w2_weight[slot])  # [H, I]
        if layer.quant_method.unquantized_backend == UnquantizedMoeBackend.FLASHINFER_CUTLASS:
            gate, up = up, gate
        for name, values, dim in (("gate", gate[:size], 0), ("up", up[:size], 0), ("down", down[:, :size], 1)):
            names = [f"{path}.{expert}.{name}_proj.weight" for expert in same]
            yield Piece(names, values, dim, copies=len(owners))


def unpacked(layer: RoutedExperts, weight: Tensor) -> Tensor:
    """[out, in] an expert's matrix, out of the order of its kernel."""
    backend = layer.quant_method.unquantized_backend
    if backend in (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.FLASHINFER_CUTLASS):
        return weight
    if backend != UnquantizedMoeBackend.CPU:
        raise RunFailed(
            f"experts' weights in the layout of vLLM's kernels {backend.value} are not read back: "
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
    """[rows * columns] which element of a matrix each of the packed one is. Digits below 256 are exact in any dtype."""
    from vllm._custom_ops import cpu_prepack_moe_weight

    numbers, found, unit = torch.arange(rows * columns), torch.zeros(rows * columns, dtype=torch.long), 1
    while unit < len(numbers):
        digits = (numbers // unit % 256).to(dtype).view(1, rows, columns)
        found += cpu_prepack_moe_weight(digits, isa).view(-1).long() * unit
        unit *= 256
    return found


def matrix(layer: nn.Module) -> Tensor:
    """[out, in] a layer's weight as it is used: by the kernel, where that has packed or rounded it."""
    weight = layer.weight
    looked_up = isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead)
    if rounds(layer):
        dtype, product = layer.params_dtype, partial(layer.quant_method.apply, layer)
    elif looked_up or not hasattr(layer, "cpu_linear"):
        return weight
    else:
        dtype, product = weight.dtype, partial(layer.cpu_linear, weight=weight, bias=None)
    columns = getattr(layer, "input_size_per_partition", layer.input_size)
    read = []
    for some in torch.arange(columns).split(COLUMNS):
        one_hot = torch.zeros(len(some), columns, dtype=dtype, device=weight.device)
        one_hot[torch.arange(len(some)), some] = 1
        read.append(product(one_hot))
    return torch.cat(read).T


def tied(model: nn.Module) -> list[nn.Module]:
    return [model.lm_head] if getattr(model.config, "tie_word_embeddings", False) and hasattr(model, "lm_head") else []
