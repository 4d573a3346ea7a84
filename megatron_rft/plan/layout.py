"""Splits the ranks into tensor, pipeline, context, expert and data parallel groups, as far as the model allows."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from megatron_rft.config.sections import Megatron
from megatron_rft.plan.model_shape import ModelShape
from megatron_rft.utils.errors import ConfigError

SHOWN = 12  # layouts named in an error
UNEVEN = {  # options of megatron-core that give pipeline stages different numbers of layers
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
}


@dataclass(frozen=True)
class Layout:
    world: int
    tp: int
    pp: int
    cp: int
    ep: int
    etp: int
    vpp: int | None = None

    @classmethod
    def of(cls, megatron: Megatron, world_size: int) -> "Layout":
        tp = megatron.tensor_model_parallel_size
        return cls(
            world_size,
            tp,
            megatron.pipeline_model_parallel_size,
            megatron.context_parallel_size,
            megatron.expert_model_parallel_size,
            megatron.expert_tensor_parallel_size or tp,
            megatron.virtual_pipeline_model_parallel_size,
        )

    @property
    def dp(self) -> int:
        return self.world // (self.tp * self.pp * self.cp)

    def __str__(self) -> str:
        experts = f" (experts: EP {self.ep} x TP {self.etp})" if self.ep > 1 or self.etp != self.tp else ""
        return f"TP {self.tp} x PP {self.pp} x CP {self.cp} x DP {self.dp}{experts}"


def problems(layout: Layout, shape: ModelShape | None, even_stages: bool = True) -> Iterator[str]:
    """Yield the reasons why the layout is impossible. `even_stages`: every pipeline stage has the same number of
    layers."""
    tp, pp, cp, ep, etp = layout.tp, layout.pp, layout.cp, layout.ep, layout.etp
    if layout.world % (tp * pp * cp):
        yield f"{layout.world} ranks are not a multiple of TP {tp} x PP {pp} x CP {cp} = {tp * pp * cp}"
    if (ep > 1 or etp != tp) and layout.world % (etp * ep * pp):
        yield f"{layout.world} ranks are not a multiple of the experts' TP {etp} x EP {ep} x PP {pp} = {etp * ep * pp}"
    if shape is None:
        return
    if cp > 1 and shape.whole_sequences:
        yield f"context parallelism cuts sequences, and {shape.whole_sequences}"
    if shape.heads % tp:
        yield f"{shape.heads} attention heads do not divide by TP {tp}"
    elif shape.kv_heads % tp and tp % shape.kv_heads:
        yield f"{shape.kv_heads} kv heads are neither a multiple nor a divisor of TP {tp}"
    elif shape.own_groups and tp > shape.kv_heads:
        yield f"TP {tp} is above the {shape.kv_heads} kv heads, and an output gate or norms over all heads share none"
    if not shape.experts and shape.ffn % tp:
        yield f"the feed-forward size {shape.ffn} does not divide by TP {tp}"
    if even_stages and shape.layers % (pp * (layout.vpp or 1)):
        stages = f"PP {pp} x {layout.vpp} virtual stages" if layout.vpp else f"PP {pp}"
        yield f"{shape.layers} layers do not divide by {stages}"
    if shape.experts == 0 and ep > 1:
        yield f"expert_model_parallel_size is {ep}, and the model has no experts"
    elif shape.experts and etp != tp and ep == 1:
        # megatron-core then reduces the experts' gradients over the wrong ranks
        yield f"expert_tensor_parallel_size {etp} with TP {tp} needs expert_model_parallel_size above 1"
    elif shape.experts % ep:
        yield f"{shape.experts} experts do not divide by EP {ep}"
    if etp > 1 and shape.whole_experts:
        yield f"expert_tensor_parallel_size is {etp}, and {shape.whole_experts}: set it to 1"
    elif shape.experts and shape.expert_ffn % etp:
        yield f"the experts' feed-forward size {shape.expert_ffn} does not divide by their TP {etp}"


def possible(world: int, shape: ModelShape | None) -> list[Layout]:
    """Return the possible layouts of this many ranks, the simplest first."""
    sizes = [size for size in range(1, world + 1) if world % size == 0]
    layouts = [
        Layout(world, tp, pp, cp, ep, 1 if shape and shape.whole_experts else tp)
        for cp, ep, pp, tp in product(sizes, sizes if shape and shape.experts else [1], sizes, sizes)
    ]
    return [layout for layout in layouts if not list(problems(layout, shape))]


def check_layout(megatron: Megatron, world_size: int, shape: ModelShape | None) -> Layout:
    layout = Layout.of(megatron, world_size)
    wrong = list(problems(layout, shape, even_stages=not UNEVEN & set(megatron.extra)))
    if wrong:
        others = possible(world_size, shape)
        named = "\n  ".join(map(str, others[:SHOWN])) + (f"\n  and {len(others) - SHOWN} more" * (len(others) > SHOWN))
        model = f"this model ({shape})" if shape else "a model"
        ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
        raise ConfigError(f"megatron: {'; '.join(wrong)}. With {ranks} {model} can have\n  {named}")
    _check_switches(megatron, layout, shape)
    return layout


def _check_switches(megatron: Megatron, layout: Layout, shape: ModelShape | None) -> None:
    if megatron.sequence_parallel and layout.tp == 1:
        raise ConfigError("megatron.sequence_parallel: does nothing with tensor_model_parallel_size 1: set it to false")
    if shape and shape.sequence_parallel and layout.tp > 1 and not megatron.sequence_parallel:
        why = f"{shape.sequence_parallel} with tensor parallelism needs it"
        raise ConfigError(f"megatron.sequence_parallel: {why}: set it to true")
    if layout.vpp is not None and layout.pp == 1:
        raise ConfigError(
            "megatron.virtual_pipeline_model_parallel_size: needs pipeline_model_parallel_size of 2 or more, which is 1"
        )
    if layout.vpp == 1:
        raise ConfigError("megatron.virtual_pipeline_model_parallel_size: 1 does nothing: give 2 or more, or none")
    if megatron.expert_tensor_parallel_size and shape and not shape.experts:
        raise ConfigError("megatron.expert_tensor_parallel_size: does nothing: the model has no experts")
