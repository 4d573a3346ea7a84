"""LoRA: trains a low-rank change of each linear layer of a frozen model (arXiv:2106.09685; rsLoRA: arXiv:2312.03732).

    y = W x + s B A dropout(x)        A [r, in], B [out, r], s = alpha / r, or alpha / sqrt(r)

The meaning is PEFT's: each projection of Hugging Face (q_proj, gate_proj ...) has its own A and B. A layer of
megatron-core that joins n projections has one `Adapter` with their A one below the other, `a` [n r, in], and their B in
the order of the layer's rows, `b` [out, r]. Row i of W changes by s b_i A_p(i), where p(i) is the projection that row i
belongs to; so with `b` spread into a matrix [out, n r] that is zero outside of the columns of p(i), one product serves
all projections.

Tensor parallelism needs collectives of r columns instead of thousands:

    column-parallel (qkv, fc1)   each rank has all of a, and the rows of b as those of W; x a' is equal on all ranks,
                                 and its gradient is summed over them
    row-parallel (proj, fc2)     each rank has the columns of a as those of W, and all of b; x a' is summed over ranks
    sequence parallelism         gather and reduce-scatter instead. What each rank has all of then sees only the rank's
                                 tokens: megatron-core sums its gradient as that of a norm (`sequence_parallel`)

A vision tower is whole on each rank, and so are its adapters.

An adapter is a submodule of its layer, which keeps its class, its parameters and their names. Transformer Engine's
layer with a fused norm returns the normalised input too, which the adapter reads.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.utils import make_sharded_tensor_for_checkpoint, make_tp_sharded_tensor_for_checkpoint
from torch import Tensor, nn

from megatron_rft.config.lora import LAYERS, VISION, Lora
from megatron_rft.conversion import Mapping, hf_shapes, partition_dim, shard
from megatron_rft.conversion.mapping import GATE_AND_UP
from megatron_rft.families.towers import TOWER
from megatron_rft.megatron import parallel
from megatron_rft.megatron.model import ValueHead

COLUMN = ("linear_qkv", "linear_fc1")


class Adapter(nn.Module):
    """The adapters of one layer. `name`: the canonical name of the layer; `part_of_row` [rows of this rank]: the number
    of the projection that each row of the layer's weight belongs to."""

    def __init__(self, name: str, weight: Tensor, part_of_row: Tensor, options: Lora, sequence_parallel: bool):
        super().__init__()
        parts, (rows, columns) = int(part_of_row.max()) + 1, weight.shape
        self.name, self.scale, self.dropout = name, options.scale, options.dropout
        self.whole = name.startswith(TOWER)
        self.column, self.sequence_parallel = name.endswith(COLUMN), sequence_parallel
        self.a = nn.Parameter(weight.new_empty(parts * options.rank, columns))
        self.b = nn.Parameter(weight.new_empty(rows, options.rank))
        self.register_buffer("member", F.one_hot(part_of_row, parts).to(weight), persistent=False)  # [rows, parts]
        for part in ("a", "b"):
            dim, parameter = partition_dim(f"{name}.adapter.{part}"), getattr(self, part)
            if dim is None:
                parameter.sequence_parallel = sequence_parallel
            else:  # otherwise the gradient's norm would count only the first rank's part
                tensor_parallel.set_tensor_model_parallel_attributes(parameter, True, dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, in / tp] -> [s, b, out / tp], as the layer's input and output are split."""
        low = F.linear(self.dropped(x) if self.dropout and self.training else x, self.a)  # [s, b, n r]
        return F.linear(low if self.whole else self._over_ranks(low), self.scale * self.spread(self.b))

    def _over_ranks(self, low: Tensor) -> Tensor:
        if self.column:
            if self.sequence_parallel:
                return tensor_parallel.gather_from_sequence_parallel_region(low)
            return tensor_parallel.copy_to_tensor_model_parallel_region(low)
        if self.sequence_parallel:
            return tensor_parallel.reduce_scatter_to_sequence_parallel_region(low)
        return tensor_parallel.reduce_from_tensor_model_parallel_region(low)

    def dropped(self, x: Tensor) -> Tensor:
        """x with a share of zeros. The mask is a function of the CPU generator's state, which `Actor.backward` sets and
        recomputation restores. Tensor-parallel ranks share it where they share x, else the copies of a would differ."""
        number = int(torch.randint(1 << 40, ()))
        if not self.whole and (self.sequence_parallel or not self.column):
            number += parallel.tp_rank() << 40
        generator = torch.Generator(x.device).manual_seed(number)
        kept = torch.rand(x.shape, generator=generator, device=x.device) >= self.dropout
        return x * kept / (1 - self.dropout)

    def spread(self, b: Tensor) -> Tensor:
        """[rows, r] -> [rows, n r], zero outside of the columns of the row's projection."""
        return (self.member.to(b)[:, :, None] * b[:, None]).flatten(1) if self.member.shape[1] > 1 else b

    def change(self) -> Tensor:
        """[rows, in] fp32: the change of this rank's part of the layer's weight."""
        return self.scale * (self.spread(self.b.float()) @ self.a.float())


def attach(chunks: list[GPTModel], options: Lora, hf_config: Any) -> None:
    """Freeze the model but for a value head, and give the layers of `options.targets` adapters, which `weights.load`
    sets."""
    heights = {name: shape[0] for name, shape in hf_shapes(hf_config).items()}
    for model in chunks:
        model.requires_grad_(False)
        if isinstance(getattr(model, "output_layer", None), ValueHead):
            model.output_layer.requires_grad_(True)
        if model.pre_process:
            model.embedding.register_forward_hook(_with_gradient)
        for name, linear in [*_layers(model, options)]:
            parts = part_of_row(f"{name}.weight", Mapping(hf_config), heights).to(linear.weight.device)
            adapter = Adapter(name, linear.weight, parts, options, model.config.sequence_parallel)
            linear.adapter = linear.weight.adapter = adapter  # the second for `weights.WeightStream`
            linear.return_layernorm_output = hasattr(linear, "layer_norm_weight")
            linear.register_forward_hook(_add)


def _layers(model: GPTModel, options: Lora) -> Iterator[tuple[str, nn.Module]]:
    """Yield (canonical name, layer) of what gets adapters."""
    for layer in model.decoder.layers:
        present = dict(layer.named_modules())  # a delta net has no attention's
        for place in (place for target in options.targets for place in LAYERS[target] if place in present):
            yield f"decoder.layers.{layer.layer_number - 1}.{place}", present[place]
    if "vision" in options.targets:
        yield from ((name, module) for name, module in model.named_modules() if VISION.fullmatch(name))


def part_of_row(name: str, mapping: Mapping, heights: dict[str, int]) -> Tensor:
    """[rows of this rank] the number of the projection of each row of the weight `name`. `heights`: HF name -> rows."""
    numbers = [torch.full((heights[part],), i) for i, part in enumerate(mapping.hf_names(name))]
    whole = mapping.merge(name, numbers)
    return shard(name, whole, parallel.tp_size(), parallel.tp_rank()) if partition_dim(name) == 0 else whole


def _with_gradient(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    """A recomputed layer gives its parameters no gradient if none of its inputs requires one."""
    return output.requires_grad_() if torch.is_grad_enabled() else output


def _add(layer: nn.Module, inputs: tuple, output: Any) -> Any:
    """The layer's output with the adapter's."""
    if torch.is_tensor(output):  # of a vision tower
        return output + layer.adapter(inputs[0])
    (out, bias), x = output, inputs[0]
    if isinstance(out, tuple):  # a fused norm: the output, and the normalised input
        out, x = out
    return out + layer.adapter(x), bias


def sharded_state(model: GPTModel, prefix: str, metadata: dict[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint stores of a model: everything, or, if it has adapters, only what is trained."""
    whole = model.sharded_state_dict(prefix, metadata=metadata)
    adapters = {name: module for name, module in model.named_modules() if isinstance(module, Adapter)}
    if not adapters:
        return whole
    trained = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            owner, _, part = name.rpartition(".")
            own = _sharded(f"{prefix}{adapters[owner].name}", part, parameter) if owner in adapters else None
            trained[prefix + name] = own or whole[prefix + name]
    return trained


def _sharded(layer: str, part: str, parameter: Tensor) -> Any:
    """A checkpoint's entry of part a or b of a layer's adapter."""
    name = f"{layer}.adapter.{part}"
    dim = partition_dim(name)
    if dim is None:
        return make_sharded_tensor_for_checkpoint(parameter, name)
    entry = make_tp_sharded_tensor_for_checkpoint(parameter, name, dim)
    return apply_swiglu_sharded_factory(entry, ()) if GATE_AND_UP.fullmatch(name) else entry
