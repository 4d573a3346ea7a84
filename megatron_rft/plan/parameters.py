"""Counts a rank's parameters, and lays them out as the distributed optimizer of megatron-core 0.16 does. No torch.

Parameters have the model's order, because the padding between them depends on it.
"""

import math
from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

from megatron_rft.families.shapes import Part, partition_dim
from megatron_rft.plan.layout import Layout
from megatron_rft.plan.model_shape import ModelShape

ALIGNMENT, BUCKET = 64, 128  # parameters begin, and buckets end, at multiples of these


class Parameter(NamedTuple):
    """A parameter on one rank. `expert`: kept in a separate buffer, because expert-parallel ranks have different
    gradients. `alone`: kept in a separate bucket, as an embedding that two pipeline stages share. `tensors`: number of
    tensors that a checkpoint makes of it."""

    count: int
    expert: bool = False
    alone: bool = False
    tensors: int = 1


def stage_layers(s: ModelShape, layout: Layout, stage: int) -> list[tuple[int, tuple[tuple[Part, ...], ...]]]:
    """Return (number of the first layer, parts by layer) of each virtual stage of a pipeline stage."""
    virtual = layout.vpp or 1
    size = s.layers // (layout.pp * virtual)
    begins = ((number * layout.pp + stage) * size for number in range(virtual))
    return [(begin, s.parts[begin : begin + size]) for begin in begins]


def stage_chunks(s: ModelShape, layout: Layout, stage: int, value_head: bool = False) -> list[list[Parameter]]:
    """Return the parameters of a rank of a pipeline stage: by virtual stage, in the model's order."""
    return [
        list(_chunk(s, layout, layers, begin == 0, begin + len(layers) == s.layers, value_head))
        for begin, layers in stage_layers(s, layout, stage)
    ]


def in_layers(s: ModelShape, layout: Layout, stage: int) -> int:
    """Return the parameters of a rank of a pipeline stage without those of embedding, last norm and head."""
    layers = (parts for _, chunk in stage_layers(s, layout, stage) for parts in chunk)
    return sum(each.count for parts in layers for each in _layer(s, layout, parts))


def total(chunks: list[list[Parameter]]) -> int:
    return sum(each.count for chunk in chunks for each in chunk)


def _chunk(
    s: ModelShape, layout: Layout, layers: tuple[tuple[Part, ...], ...], begins: bool, last: bool, value_head: bool
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


def _layer(s: ModelShape, layout: Layout, parts: tuple[Part, ...]) -> Iterator[Parameter]:
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
