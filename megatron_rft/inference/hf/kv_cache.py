"""A KV cache that stores a prompt once for all of its responses, and the attention over it.

    L  rows being decoded            S  columns of a cache (tokens)        g  query heads per key head
    N  groups (prompts) of the rows  W  rows a group may have at most      K  key and value heads,  D  their sizes

A row attends to its group's prompt and to its own tokens. The prompt part is one product for all rows of a group, as in
cascade or prefix-shared attention, so that its keys are read once per group: decoding is bound by memory traffic. Rows
have different lengths, and tokens begin in column 0: there is no padding on the left.

transformers calls `attend` through its registry of attention functions; the model's forward passes the cache to it as a
keyword, and of each layer its sliding window and its sinks. A delta net gets its states as transformers' own cache.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, Cache
from transformers.cache_utils import LinearAttentionLayer

from megatron_rft.families import family_of
from megatron_rft.families.shapes import head_dim, is_delta, kv_heads, value_dim

ATTENTION = "megatron_rft_shared_prefix"
FIRST_COLUMNS = 64


class DeltaStates(Cache):
    """The states of a model's delta nets, one for each row or prompt. Keys and values pass through to `attend`."""

    def __init__(self, config):
        super().__init__(layers=[LinearAttentionLayer() for _ in range(config.num_hidden_layers)])

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_, **__) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def select(self, index: Tensor, before: Sequence["DeltaStates"] = ()) -> "DeltaStates":
        """Return the states `index` of those `before` and these, counted through. Changes these."""
        for layers in zip(*(states.layers for states in (*before, self)), strict=True):
            for kind in ("conv_states", "recurrent_states"):
                held = [state for layer in layers if (state := getattr(layer, kind)[0]) is not None]
                if held:
                    getattr(layers[-1], kind)[0] = torch.cat(held)[index]
        return self


class SharedPrefixCache:
    """Live rows and groups come first, without gaps: the decoder calls `move` to keep it so."""

    def __init__(self, config, groups: int, width: int, rows: int, columns: tuple[int, int], like: Tensor):
        """`columns`: the most tokens of a prompt, and of a response; `like` gives dtype and device."""
        heads, self.head_dim, values = kv_heads(config), head_dim(config), value_dim(config)
        self.width, self.most_columns, self.window = width, columns[1], getattr(config, "sliding_window", None)

        self.new_states = partial(DeltaStates, config) if family_of(config).gated else lambda: None
        self.states, self.row_states, self.prompt_states = None, self.new_states(), []
        layers = [0 if is_delta(config, layer) else heads for layer in range(config.num_hidden_layers)]

        def zeros(first: int, *shape: int) -> list[Tensor]:
            # Not `empty`: a masked column has weight 0, and 0 times an uninitialised NaN is NaN.
            return [like.new_zeros(first, heads, *shape) for heads in layers]

        first = min(columns[1], FIRST_COLUMNS)
        self.prompt_keys = zeros(groups, self.head_dim, columns[0])  # each [N, K, D, S]
        self.prompt_values = zeros(groups, columns[0], values)  # each [N, K, S, D]
        self.keys = zeros(rows, self.head_dim, first)  # each [L, K, D, S]
        self.values = zeros(rows, first, values)  # each [L, K, S, D]

    def begin_prefill(self, first: int, count: int) -> None:
        """The next forward writes the prompts of groups first ... first + count - 1, padded on the right."""
        self.filling, self.states = slice(first, first + count), self.new_states()
        self.prompt_states.append(self.states)

    def enter(self, rows: int, sizes: Tensor) -> None:
        """The prompts that were filled in since the last call get rows after the first `rows`: `sizes` [n] each."""
        prompts, self.prompt_states = self.prompt_states, []
        if self.row_states:
            index = torch.arange(rows + len(sizes), device=sizes.device)
            index = index.repeat_interleave(torch.cat([torch.ones_like(index[:rows]), sizes]))
            self.row_states = prompts[-1].select(index, [self.row_states, *prompts[:-1]])

    def keep(self, to: list[int], source: list[int], count: int) -> None:
        """Rows `source` have moved to `to`; the first `count` stay."""
        if self.row_states:
            index = torch.arange(count, device=self.keys[0].device)
            index[to] = torch.tensor(source, dtype=index.dtype, device=index.device)
            self.row_states.select(index)

    def begin_decode(self, slot: Tensor, prompt_lens: Tensor, counts: Tensor, spans: tuple[int, int, int]) -> None:
        """The next forward takes the last token of each row: token `counts` - 1 of its response.

        slot [L]: group * width + index in the group; prompt_lens, counts [L]; spans: live groups, the longest prompt's
        tokens, the largest of `counts`.
        """
        self.filling, self.states, self.slot, self.spans = None, self.row_states, slot, spans
        self.rows = torch.arange(len(slot), device=slot.device)
        self.row_of_slot = slot.new_zeros(spans[0] * self.width)  # free slots use row 0; their results are not read
        self.row_of_slot[slot] = self.rows
        self._grow(spans[2])
        self.column = counts - 1  # [L]
        prompt = torch.arange(spans[1], device=slot.device) >= prompt_lens[:, None]
        response = torch.arange(spans[2], device=slot.device) >= counts[:, None]
        hidden = torch.cat([prompt, response], dim=1)[:, None, None]  # [L, 1, 1, S]
        # how many tokens each column lies before the row's last token
        in_prompt, in_response = (torch.arange(span, device=slot.device) for span in spans[1:])
        past = torch.cat(
            [prompt_lens[:, None] + self.column[:, None] - in_prompt, self.column[:, None] - in_response], 1
        )
        like = torch.zeros_like(hidden, dtype=self.keys[0].dtype)
        self.bias = {None: like.masked_fill(hidden, float("-inf"))}
        if self.window:
            far = past[:, None, None] >= self.window
            self.bias[self.window] = like.masked_fill(hidden | far, float("-inf"))

    def prefill(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scaling: float, window, sinks) -> Tensor:
        """query [n, K*g, S, D], keys and values [n, K, S, D] -> [n, S, K*g, D]. The causal mask also hides padding."""
        length = keys.shape[2]
        self.prompt_keys[layer][self.filling, ..., :length] = keys.transpose(2, 3)
        self.prompt_values[layer][self.filling, :, :length] = values
        grouped = query.shape[1] != keys.shape[1]
        if window is None and sinks is None:
            out = F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scaling, enable_gqa=grouped)
            return out.transpose(1, 2)
        allowed = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
        allowed = allowed.triu(1 - window) if window else allowed
        query = query.unflatten(1, (keys.shape[1], -1)) * scaling  # [n, K, g, S, D]
        scores = (query @ keys[:, :, None].mT).masked_fill(~allowed, float("-inf"))
        return (_softmax(scores, sinks) @ values[:, :, None]).flatten(1, 2).transpose(1, 2)

    def decode(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scaling: float, window, sinks) -> Tensor:
        """query [L, K*g, 1, D], keys and values [L, K, 1, D] -> [L, 1, K*g, D]."""
        live, kv_heads = keys.shape[:2]
        groups, in_prompt, in_response = self.spans
        row_keys, row_values = self.keys[layer][:live], self.values[layer][:live]
        row_keys[self.rows, :, :, self.column] = keys[:, :, 0]
        row_values[self.rows, :, self.column] = values[:, :, 0]
        prompt_keys = self.prompt_keys[layer][:groups, ..., :in_prompt]
        prompt_values = self.prompt_values[layer][:groups, :, :in_prompt]

        query = query.reshape(live, kv_heads, -1, self.head_dim) * scaling  # [L, K, g, D]
        to_prompt = self._by_row(self._by_group(query) @ prompt_keys, query.shape[2])
        scores = torch.cat([to_prompt, query @ row_keys[..., :in_response]], dim=-1)  # [L, K, g, S]
        weights = _softmax(scores.add_(self.bias[window])[..., None, :], sinks)[..., 0, :]
        out = weights[..., in_prompt:] @ row_values[:, :, :in_response]
        out += self._by_row(self._by_group(weights[..., :in_prompt]) @ prompt_values, query.shape[2])
        return out.view(live, 1, -1, out.shape[-1])

    def _by_group(self, values: Tensor) -> Tensor:
        """[L, K, g, X] -> [N, K, W*g, X]."""
        slots = values.index_select(0, self.row_of_slot).unflatten(0, (-1, self.width))
        return slots.transpose(1, 2).flatten(2, 3)

    def _by_row(self, values: Tensor, grouped: int) -> Tensor:
        """[N, K, W*g, X] -> [L, K, g, X]."""
        slots = values.unflatten(2, (self.width, grouped)).transpose(1, 2).flatten(0, 1)
        return slots.index_select(0, self.slot)

    def _grow(self, columns: int) -> None:
        """Allocate at least `columns` columns for responses. Grows by half, so that copies are rare."""
        have = self.values[0].shape[2]
        if columns > have:
            more = max(columns, min(have * 3 // 2, self.most_columns)) - have
            self.keys = [F.pad(keys, (0, more)) for keys in self.keys]
            self.values = [F.pad(values, (0, 0, 0, more)) for values in self.values]


def move(keys: list[Tensor], values: list[Tensor], to: Sequence[int], source: Sequence[int], columns: int) -> None:
    """Move the first `columns` tokens of rows or of groups."""
    for layer_keys, layer_values in zip(keys, values, strict=True):
        layer_keys[to, ..., :columns] = layer_keys[source, ..., :columns]
        layer_values[to, :, :columns] = layer_values[source, :, :columns]


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """[n, K, g, queries, S] scores -> weights. A sink, a logit of each head [K*g], takes part and gets no weight."""
    if sinks is None:
        return scores.softmax(-1, dtype=torch.float32).to(scores.dtype)
    column = sinks.view(scores.shape[1], -1, 1, 1).expand(*scores.shape[:-1], 1).to(scores.dtype)
    return torch.cat([scores, column], -1).softmax(-1, dtype=torch.float32)[..., :-1].to(scores.dtype)


def attend(
    module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    cache: SharedPrefixCache,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **_,
):
    """Compute attention with transformers' signature; `cache` is a keyword of the model's forward. `s_aux`: sinks."""
    run = cache.decode if cache.filling is None else cache.prefill
    return run(module.layer_idx, query, key, value, scaling, sliding_window, s_aux), None


AttentionInterface.register(ATTENTION, attend)
