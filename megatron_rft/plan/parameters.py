"""Counts a rank's parameters, and lays them out as the distributed optimizer of megatron-core 0.16 does. No torch.

Parameters have the model's order, because the padding between them depends on it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from megatron_rft.families.shapes import Part, delta_rows, first, layer_parts, of_json, partition_dim
from megatron_rft.plan.layout import Layout
from megatron_rft.plan.model_shape import ModelShape, read_config, shape_of

ALIGNMENT, BUCKET = 64, 128  # parameters begin, and buckets end, at multiples of these


@dataclass(frozen=True)
class Sizes(ModelShape):
    """What config.json says about the parameters."""

    tied: bool
    experts_per_token: int
    parts: tuple[tuple[Part, ...], ...]  # by layer
    delta: tuple[int, int, int, int] = (0, 0, 0, 0)  # key heads, their size, value heads of each, their size

    @classmethod
    def read(cls, folder: Path) -> "Sizes":
        return cls.of(read_config(folder))

    @classmethod
    def of(cls, config: dict[str, Any]) -> "Sizes":
        """`config`: the content of a config.json."""
        shape, c = shape_of(config), of_json(config)
        heads, rows = delta_rows(c)
        return cls(
            **vars(shape),
            tied=bool(first(c, "tie_word_embeddings")),
            experts_per_token=first(c, "num_experts_per_tok", default=0),
            parts=tuple(tuple(layer_parts(c, i)) for i in range(shape.layers)),
            delta=(heads, rows[0], rows[4], rows[2] // rows[4]) if heads else (0, 0, 0, 0),
        )

    @cached_property
    def mixture(self) -> tuple[bool, ...]:
        """Whether each layer has experts."""
        return tuple(any(part.expert for part in layer) for layer in self.parts)

    @cached_property
    def qk_norm(self) -> bool:
        return any(part.name.startswith("self_attention.q_layernorm.") for layer in self.parts for part in layer)

    @cached_property
    def delta_share(self) -> float:
        """The share of the layers that are delta nets."""
        return sum(any(part.name.endswith(".A_log") for part in layer) for layer in self.parts) / len(self.parts)

    @property
    def q(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        return self.kv_heads * self.head_dim

    @cached_property
    def multiplied(self) -> int:
        """Parameters of the matrices that multiply a token: of its own experts only, and without the embedding."""
        count = self.vocabulary * self.hidden
        for part in (part for layer in self.parts for part in layer if len(part.shape) == 2):
            count += math.prod(part.shape) * (self.experts_per_token if part.expert else 1)
        return count

    def whole(self) -> int:
        """Return the number of parameters of the whole model."""
        alone = Layout(1, 1, 1, 1, 1, 1)
        return sum(p.count for chunk in stage_chunks(self, alone, 0, value_head=False) for p in chunk)


class Parameter(NamedTuple):
    """A parameter on one rank. `expert`: kept in a separate buffer, because expert-parallel ranks have different
    gradients. `alone`: kept in a separate bucket, as an embedding that two pipeline stages share. `tensors`: number of
    tensors that a checkpoint makes of it."""

    count: int
    expert: bool = False
    alone: bool = False
    tensors: int = 1


def stage_layers(s: Sizes, layout: Layout, stage: int) -> list[tuple[int, tuple[tuple[Part, ...], ...]]]:
    """Return (number of the first layer, parts by layer) of each virtual stage of a pipeline stage."""
    virtual = layout.vpp or 1
    size = s.layers // (layout.pp * virtual)
    begins = ((number * layout.pp + stage) * size for number in range(virtual))
    return [(begin, s.parts[begin : begin + size]) for begin in begins]


def stage_chunks(s: Sizes, layout: Layout, stage: int, value_head: bool) -> list[list[Parameter]]:
    """Return the parameters of a rank of a pipeline stage: by virtual stage, in the model's order."""
    return [
        list(_chunk(s, layout, layers, begin == 0, begin + len(layers) == s.layers, value_head))
        for begin, layers in stage_layers(s, layout, stage)
    ]


def _chunk(
    s: Sizes, layout: Layout, layers: tuple[tuple[Part, ...], ...], begins: bool, last: bool, value_head: bool
) -> Iterator[Parameter]:
    vocabulary = -(-s.vocabulary // layout.tp) * s.hidden
    shared = s.tied and not value_head
    if begins:
        yield Parameter(vocabulary, alone=shared and not last)
    for parts in layers:
        yield from _layer(s, layout, parts)
    if last:
        yield Parameter(s.hidden)
        if value_head:
            yield Parameter(s.hidden)
        elif not (shared and begins):
            yield Parameter(vocabulary, alone=shared)


def _layer(s: Sizes, layout: Layout, parts: tuple[Part, ...]) -> Iterator[Parameter]:
    """Yield the parameters of a layer; those of an expert come together."""
    for expert, found in groupby((part for part in parts if part.parameter), key=lambda part: part.expert):
        ranks, group = layout.etp if expert else layout.tp, list(found)
        counts = [math.prod(p.shape) // (1 if partition_dim(p.name) is None else ranks) for p in group]
        tensors = [2 if "linear_fc1" in p.name and len(p.hf_names) == 2 else 1 for p in group]  # gate and up
        times = s.experts // layout.ep if expert else 1
        for count, number in list(zip(counts, tensors, strict=True)) * times:
            yield Parameter(count, expert=expert and layout.ep > 1, tensors=number)


def buckets(parameters: list[Parameter], ranks: int, size: float) -> list[tuple[int, list[tuple[int, int]]]]:
    """Lay parameters into a buffer as the distributed optimizer does, from the last to the first. Return the padded
    length of each bucket and the (begin, end) of its parameters. A bucket of at least `size` elements is closed."""
    closed, place = [], 0
    inside: list[tuple[int, int]] = []

    def close() -> None:
        nonlocal place, inside
        unit = math.lcm(ranks, BUCKET)
        place = -(-place // unit) * unit
        closed.append((place, inside))
        place, inside = 0, []

    for parameter in reversed(parameters):
        place = -(-place // ALIGNMENT) * ALIGNMENT
        if parameter.alone and inside:
            close()
        inside.append((place, place + parameter.count))
        place += parameter.count
        if parameter.alone or place >= size:
            close()
    if inside:
        close()
    return closed


def owned(buffer: list[tuple[int, list[tuple[int, int]]]], ranks: int) -> int:
    """Return the number of parameters of the rank with the largest slice of the buffer."""
    per_rank = [0] * ranks
    for length, inside in buffer:
        part = length // ranks
        for begin, end in inside:
            for rank in range(begin // part, -(-end // part)):
                per_rank[rank] += min(end, (rank + 1) * part) - max(begin, rank * part)
    return max(per_rank)
