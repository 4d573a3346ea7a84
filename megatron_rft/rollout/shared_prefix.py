"""Keys and values of a decoding batch, the prompt's kept once for all responses to it, and the attention over them.

    L  rows being decoded            S  columns of a cache (tokens)        g  query heads per key head
    N  groups (prompts) of the rows  W  rows a group may have at most      K  key and value heads,  D  their size

A row attends to its group's prompt and to its own tokens. The prompt part is one product for all rows of a group
(as in cascade or prefix-shared attention), so that its keys are neither copied nor read G times: decoding is bound by
memory traffic. Every row has a length of its own, tokens begin in column 0, and there is no padding on the left.

transformers calls `attend` through its registry of attention functions; the cache reaches it as a keyword of the
model's forward. Sliding windows are not known here.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface

ATTENTION = "megatron_rft_shared_prefix"
FIRST_COLUMNS = 64


class SharedPrefixCache:
    """Rows and groups are dense: the live ones are the first. What moves them says so to `move_*`."""

    def __init__(self, config, groups: int, width: int, rows: int, columns: tuple[int, int], like: Tensor):
        """`columns`: the most tokens of a prompt, and of a response; `like` gives dtype and device."""
        heads = config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.width, self.most_columns = width, columns[1]

        def empty(count: int, length: int) -> list[Tensor]:
            # zeros: a hidden column has weight 0, but 0 times an uninitialised NaN is NaN
            return [like.new_zeros(2, count, heads, length, self.head_dim) for _ in range(config.num_hidden_layers)]

        self.prompts = empty(groups, columns[0])  # each [2, N, K, S, D]: keys, values
        self.responses = empty(rows, min(columns[1], FIRST_COLUMNS))  # each [2, L, K, S, D]

    def begin_prefill(self, first: int, count: int) -> None:
        """The next forward writes the prompts of groups first ... first + count - 1, padded on the right."""
        self.filling = slice(first, first + count)

    def begin_decode(self, slot: Tensor, prompt_lens: Tensor, counts: Tensor, spans: tuple[int, int, int]) -> None:
        """The next forward takes one token a row, which becomes token `counts` - 1 of its response.

        slot [L]: group * width + place in the group; prompt_lens, counts [L]; spans: live groups, the longest prompt's
        tokens, the largest of `counts`.
        """
        self.filling, self.slot, self.column = None, slot, counts - 1
        self.rows, self.spans = torch.arange(len(slot), device=slot.device), spans
        self._grow(spans[2])
        prompt = torch.arange(spans[1], device=slot.device) >= prompt_lens[:, None]
        response = torch.arange(spans[2], device=slot.device) >= counts[:, None]
        hidden = torch.cat([prompt, response], dim=1)[:, None, None]
        self.bias = torch.zeros_like(hidden, dtype=self.prompts[0].dtype).masked_fill_(hidden, float("-inf"))

    def prefill(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """query [n, K*g, S, D], keys and values [n, K, S, D] -> [n, S, K*g, D]. Causality alone hides the padding."""
        length = keys.shape[2]
        self.prompts[layer][0, self.filling, :, :length] = keys
        self.prompts[layer][1, self.filling, :, :length] = values
        grouped = query.shape[1] != keys.shape[1]
        out = F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scaling, enable_gqa=grouped)
        return out.transpose(1, 2)

    def decode(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """query [L, K*g, 1, D], keys and values [L, K, 1, D] -> [L, 1, K*g, D]."""
        live, kv_heads = keys.shape[:2]
        groups, in_prompt, in_response = self.spans
        own = self.responses[layer][:, :live]
        own[0, self.rows, :, self.column] = keys[:, :, 0]
        own[1, self.rows, :, self.column] = values[:, :, 0]
        own_keys, own_values = own[:, :, :, :in_response]
        prompt_keys, prompt_values = self.prompts[layer][:, :groups, :, :in_prompt]

        query = query.reshape(live, kv_heads, -1, self.head_dim) * scaling  # [L, K, g, D]
        scores = torch.cat(
            [
                self._by_row(self._by_group(query) @ prompt_keys.transpose(2, 3), query.shape[2]),
                query @ own_keys.transpose(2, 3),
            ],
            dim=-1,
        )  # [L, K, g, S of the prompt + S of the response]
        weights = scores.add_(self.bias).softmax(-1, dtype=torch.float32).to(query.dtype)
        out = weights[..., in_prompt:] @ own_values
        out += self._by_row(self._by_group(weights[..., :in_prompt]) @ prompt_values, query.shape[2])
        return out.view(live, 1, -1, self.head_dim)

    def _by_group(self, values: Tensor) -> Tensor:
        """[L, K, g, X] -> [N, K, W*g, X], zero where a group has no row."""
        _, heads, grouped, size = values.shape
        slots = values.new_zeros(self.spans[0] * self.width, heads, grouped, size)
        slots[self.slot] = values
        return slots.view(-1, self.width, heads, grouped, size).transpose(1, 2).flatten(2, 3)

    def _by_row(self, values: Tensor, grouped: int) -> Tensor:
        """[N, K, W*g, X] -> [L, K, g, X]."""
        return values.unflatten(2, (self.width, grouped)).transpose(1, 2).flatten(0, 1)[self.slot]

    def _grow(self, columns: int) -> None:
        """Room for `columns` tokens of a response: half as much again, so that copies stay a small share."""
        have = self.responses[0].shape[3]
        if columns > have:
            more = max(columns, min(have * 3 // 2, self.most_columns)) - have
            self.responses = [F.pad(layer, (0, 0, 0, more)) for layer in self.responses]

    def move_rows(self, to: Sequence[int], source: Sequence[int]) -> None:
        _move(self.responses, to, source, self.spans[2])

    def move_groups(self, to: Sequence[int], source: Sequence[int]) -> None:
        _move(self.prompts, to, source, self.spans[1])


def _move(layers: list[Tensor], to: Sequence[int], source: Sequence[int], columns: int) -> None:
    for layer in layers:
        layer[:, to, :, :columns] = layer[:, source, :, :columns]


def attend(module, query, key, value, attention_mask, scaling: float, cache: SharedPrefixCache, **_):
    """transformers' calling convention; `cache` comes from the caller of the model's forward."""
    run = cache.decode if cache.filling is None else cache.prefill
    return run(module.layer_idx, query, key, value, scaling), None


AttentionInterface.register(ATTENTION, attend)
