"""Counts a rank's parameters, and lays them out as the distributed optimizer of megatron-core 0.16 does. No torch.

Parameters have the model's order, because the padding between them depends on it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megatron_rft.families import ARCHITECTURES
from megatron_rft.plan.layout import Layout
from megatron_rft.plan.model_shape import ModelShape, read_config, shape_of

ALIGNMENT, BUCKET = 64, 128  # parameters begin, and buckets end, at multiples of these


@dataclass(frozen=True)
class Sizes(ModelShape):
    """What config.json says about the parameters."""

    tied: bool
    qkv_bias: bool
    qk_norm: bool
    experts_per_token: int
    mixture: tuple[bool, ...]  # by layer

    @classmethod
    def read(cls, folder: Path) -> "Sizes":
        config = read_config(folder)
        shape, family = shape_of(config), ARCHITECTURES[config["architectures"][0]]
        sparse, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ()
        mixture = (bool(shape.experts) and i not in dense and (i + 1) % sparse == 0 for i in range(shape.layers))
        return cls(
            **vars(shape),
            tied=bool(config.get("tie_word_embeddings")),
            qkv_bias=family.qkv_bias,
            qk_norm=family.qk_norm,
            experts_per_token=config.get("num_experts_per_tok") or 0,
            mixture=tuple(mixture),
        )

    @property
    def q(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def multiplied(self) -> int:
        """Parameters of the matrices that multiply a token: of its own experts only, and without the embedding."""
        attention = self.hidden * (2 * self.q + 2 * self.kv)
        experts = self.experts_per_token * 3 * self.hidden * self.expert_ffn + self.experts * self.hidden
        layers = [experts if mixture else 3 * self.hidden * self.ffn for mixture in self.mixture]
        return sum(layers) + len(layers) * attention + self.vocabulary * self.hidden

    def whole(self) -> int:
        """Return the number of parameters of the whole model."""
        alone = Layout(1, 1, 1, 1, 1, 1)
        return sum(p.count for chunk in stage_chunks(self, alone, 0, value_head=False) for p in chunk)


class Parameter(NamedTuple):
    """A parameter on one rank. `expert`: kept in a separate buffer, because expert-parallel ranks have different
    gradients. `alone`: kept in a separate bucket, as an embedding that two pipeline stages share."""

    count: int
    expert: bool = False
    alone: bool = False


def stage_chunks(s: Sizes, layout: Layout, stage: int, value_head: bool) -> list[list[Parameter]]:
    """Return the parameters of a rank of a pipeline stage: by virtual stage, in the model's order."""
    virtual = layout.vpp or 1
    size = len(s.mixture) // (layout.pp * virtual)
    chunks = []
    for number in range(virtual):
        begin = (number * layout.pp + stage) * size
        first, last = begin == 0, begin + size == len(s.mixture)
        layers = s.mixture[begin : begin + size]
        chunks.append(list(_chunk(s, layout, layers, first, last, value_head)))
    return chunks


def _chunk(
    s: Sizes, layout: Layout, layers: tuple[bool, ...], first: bool, last: bool, value_head: bool
) -> Iterator[Parameter]:
    vocabulary = -(-s.vocabulary // layout.tp) * s.hidden
    shared = s.tied and not value_head
    if first:
        yield Parameter(vocabulary, alone=shared and not last)
    for mixture in layers:
        yield from _layer(s, layout, mixture)
    if last:
        yield Parameter(s.hidden)
        if value_head:
            yield Parameter(s.hidden)
        elif not (shared and first):
            yield Parameter(vocabulary, alone=shared)


def _layer(s: Sizes, layout: Layout, mixture: bool) -> Iterator[Parameter]:
    tp, qkv = layout.tp, s.q + 2 * s.kv
    yield Parameter(s.hidden)
    yield Parameter(s.q // tp * s.hidden)
    yield Parameter(qkv // tp * s.hidden)
    if s.qkv_bias:
        yield Parameter(qkv // tp)
    if s.qk_norm:
        yield from (Parameter(s.head_dim), Parameter(s.head_dim))
    yield Parameter(s.hidden)
    if not mixture:
        yield from (Parameter(n * s.ffn // tp * s.hidden) for n in (2, 1))
        return
    yield Parameter(s.experts * s.hidden)
    for _ in range(s.experts // layout.ep):
        yield from (Parameter(n * s.expert_ffn // layout.etp * s.hidden, expert=layout.ep > 1) for n in (2, 1))


def buckets(parameters: list[Parameter], ranks: int, size: float) -> list[tuple[int, list[tuple[int, int]]]]:
    """Lay parameters into a buffer as the distributed optimizer does, from the last to the first. Return the padded
    length of each bucket and the (begin, end) of its parameters. A bucket of at least `size` elements is closed."""
    found, place = [], 0
    inside: list[tuple[int, int]] = []

    def close() -> None:
        nonlocal place, inside
        unit = math.lcm(ranks, BUCKET)
        place = -(-place // unit) * unit
        found.append((place, inside))
        place, inside = 0, []

    for each in reversed(parameters):
        place = -(-place // ALIGNMENT) * ALIGNMENT
        if each.alone and inside:
            close()
        inside.append((place, place + each.count))
        place += each.count
        if each.alone or place >= size:
            close()
    if inside:
        close()
    return found


def owned(buffer: list[tuple[int, list[tuple[int, int]]]], ranks: int) -> int:
    """Return the number of parameters of the rank with the largest slice of the buffer."""
    per_rank = [0] * ranks
    for length, inside in buffer:
        part = length // ranks
        for begin, end in inside:
            for rank in range(begin // part, -(-end // part)):
                per_rank[rank] += min(end, (rank + 1) * part) - max(begin, rank * part)
    return max(per_rank)
