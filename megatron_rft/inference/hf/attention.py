"""What a step of one token a row computes: attention without copies of keys, and a cache that is written in place."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "sdpa_of_groups"
ROOM = 64  # positions that a cache has ahead


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """transformers' sdpa. Where each row has one query token, the query heads that share a key head are computed as
    queries of one head, instead of copying the keys for each of them. On a CPU a mask of floating point is added to the
    scores by hand.

    query [L, heads, T, d], key and value [L, kv heads, S, d], mask [L, 1, T, S] -> [L, T, heads, d]
    """
    rows, heads, length, _ = query.shape
    shared: Shared | None = getattr(key, "shared", None)
    if shared is None and (length > 1 or heads == key.shape[1] or options.get("position_bias") is not None):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    grouped = query.view(rows, key.shape[1], -1, query.shape[-1])
    added = attention_mask is not None and attention_mask.is_floating_point()
    if shared or (added and attention_mask.device.type == "cpu"):
        grouped = grouped * (options.get("scaling") or query.shape[-1] ** -0.5)
        scores = grouped @ key.mT  # [L, kv heads, heads of one, S]
        if shared:
            scores = torch.cat([shared.rows.times(grouped, shared.keys.mT), scores], -1)
        weights = scores.add_(attention_mask).softmax(-1)  # in less time than sdpa, which reads few keys slowly
        out = weights[..., -key.shape[2] :] @ value
        if shared:
            out += shared.rows.times(weights[..., : -key.shape[2]], shared.values)
        return out.view(rows, 1, heads, -1), None
    out = F.scaled_dot_product_attention(grouped, key, value, attention_mask, scale=options.get("scaling"))
    return out.reshape(rows, 1, heads, -1), None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


class Continuations:
    """The rows that continue n prompts, the same for all layers. `own` [L]: the prompt of each row; those of a prompt
    follow each other. `used`: the prompts that any row continues."""

    def __init__(self, own: Tensor):
        self.used, self.own, counts = own.unique(return_inverse=True, return_counts=True)
        self.shape = len(self.used), int(counts.max())  # prompts, and places for rows of each
        number = torch.arange(len(own), device=own.device) - (counts.cumsum(0) - counts)[self.own]  # of its prompt's
        self.places = self.own * self.shape[1] + number
        self._kept: tuple[Tensor, Continuations] | None = None

    def kept(self, index: Tensor) -> "Continuations":
        """The rows `index`; one object for all layers that ask for them."""
        if self._kept is None or self._kept[0] is not index:
            self._kept = index, Continuations(self.own[index])
        return self._kept[1]

    def times(self, of_rows: Tensor, of_prompts: Tensor) -> Tensor:
        """[L, kv heads, heads of one, a] of each row times [n, kv heads, a, b] of its prompt: one product a prompt."""
        full = len(self.places) == self.shape[0] * self.shape[1]
        if not full:
            empty = of_rows.new_zeros(self.shape[0] * self.shape[1], *of_rows.shape[1:])
            of_rows = empty.index_copy_(0, self.places, of_rows)
        product = of_rows.unflatten(0, self.shape).transpose(1, 2).flatten(2, 3) @ of_prompts
        product = product.unflatten(2, (self.shape[1], -1)).transpose(1, 2).flatten(0, 1)
        return product if full else product[self.places]


class Shared:
    """Keys and values of prompts [n, kv heads, S, d], once for all `rows` that continue them."""

    def __init__(self, keys: Tensor, values: Tensor, rows: Continuations):
        self.rows, count = rows, len(rows.used)
        self.keys, self.values = (x if len(x) == count else x[rows.used] for x in (keys, values))


class InPlaceLayer(DynamicLayer):
    """A layer's keys and values [L, kv heads, S, d], views of tensors with room for more positions. After `share` these
    are of what follows the prompts; `get_seq_length` counts both."""

    _room: tuple[Tensor, Tensor] | None = None
    shared: Shared | None = None

    def share(self, rows: Continuations) -> None:
        """Keep what there is once, and go on with `rows` that continue it."""
        self.shared, self._room, old = Shared(self.keys, self.values, rows), None, (self.keys, self.values)
        self.keys, self.values = (x.new_empty(len(rows.own), x.shape[1], 0, x.shape[3]) for x in old)

    def get_seq_length(self) -> int:
        return super().get_seq_length() + (self.shared.keys.shape[2] if self.shared else 0)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = super().get_seq_length()
        end = start + key_states.shape[-2]
        if self._room is None or end > self._room[0].shape[-2]:
            new, old = (key_states, value_states), (self.keys, self.values)
            self._room = tuple(x.new_empty(*x.shape[:2], end + ROOM, x.shape[-1]) for x in new)
            if start:
                for room, states in zip(self._room, old, strict=True):
                    room[:, :, :start] = states
        for room, states in zip(self._room, (key_states, value_states), strict=True):
            room[:, :, start:end] = states
        self.keys, self.values = (room[:, :, :end] for room in self._room)
        self.keys.shared = self.shared  # for `attention`
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._room = None
        if self.shared:
            self.shared = Shared(self.shared.keys, self.shared.values, self.shared.rows.kept(beam_idx))


def takes_bias(config: Any, dtype: torch.dtype) -> bool:
    """Whether each layer of a model attends to all positions, so that one bias serves them all."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return dtype == torch.float32 and kinds == {"full_attention"} and not getattr(config, "sliding_window", None)


def cache(config: Any) -> DynamicCache:
    """transformers' cache for a model, whose growing layers are written in place."""
    made = DynamicCache(config=config)
    made.layers = [InPlaceLayer() if type(layer) is DynamicLayer else layer for layer in made.layers]
    return made
