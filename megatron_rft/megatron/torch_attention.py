"""Torch's norms and attention for megatron-core's layers, on any device.

Attention supports right-padded batches, packed sequences (thd), packed sequences that share prompts, and context
parallelism. Over packed sequences it runs in buckets of similar length; with context parallelism it runs under one mask
with all keys gathered.

Where responses share prompts (`packing.SharedPrompts`), a response's token attends to all of its prompt and, causally,
to its own response. Keys and values are gathered, the prompt's before those of each response, for calls with a
bottom-right causal mask; the CPU has its own way, in cpu/layers.py.
"""

import functools
from itertools import pairwise
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from megatron_rft.megatron.cpu.layers import Normalise, SplitAttention, rows, span
from megatron_rft.megatron.packing import SharedPrompts, zigzag
from megatron_rft.records import segment_ids, send

BOTTOM_RIGHT = SimpleNamespace(name="padding_causal_bottom_right")  # megatron-core's enumeration lacks it


def take_rows(values: Tensor, index: Tensor) -> Tensor:
    """values[index] where `index` names some rows more than once: with a backward pass that adds up in a fixed order.
    On a CPU that is index_select's, on a GPU indexing's."""
    return values.index_select(0, index) if values.is_cpu else values[index]


class TakeKeys(torch.autograd.Function):
    """[T, heads, d] -> [K, heads, d]: the rows `SharedPrompts.gathered`. The backward pass sums the gradients of all
    copies of a prompt at once and in a fixed order; indexing's would sort the index in every layer."""

    @staticmethod
    def forward(ctx, values: Tensor, shared: SharedPrompts) -> Tensor:
        ctx.shared = shared
        return values.index_select(0, shared.gathered[0])

    @staticmethod
    def backward(ctx, grad: Tensor):
        own, prompts = ctx.shared.copies
        out = grad.index_select(0, own)
        for start, end, places in prompts:
            out[start:end] = grad[places].sum(0)
        return out, None


def attend_gathered(q: Tensor, k: Tensor, v: Tensor, shared: SharedPrompts, scale: float | None) -> Tensor:
    """[T, heads, d] -> [T, heads, d], on any device: one call for each segment."""
    ends = shared.gathered[1]
    k, v = (TakeKeys.apply(x, shared) for x in (k, v))
    outs = []
    for (start, end), (first, last) in zip(pairwise(shared.segments), pairwise(ends), strict=True):
        mask = bottom_right(end - start, last - first, q.device)
        parts = [span(q, start, end), span(k, first, last), span(v, first, last)]
        out = F.scaled_dot_product_attention(*parts, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


def bottom_right(queries: int, keys: int, device: torch.device) -> Tensor:
    """Each query sees all keys but those of later queries. On a GPU a bias without values, by which torch chooses flash
    attention; a mask of values would be kept for the backward pass."""
    if device.type == "cuda":
        return causal_lower_right(queries, keys)
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def with_shared_prompts(attention: type) -> type:
    """megatron-core's TEDotProductAttention that also knows SharedPrompts: Transformer Engine takes other lengths of
    keys than of queries, and calls the mask padding_causal_bottom_right."""

    class SharedPromptAttention(attention):
        def forward(self, query, key, value, attention_mask, attn_mask_type, packed_seq_params=None, **options):
            if isinstance(packed_seq_params, SharedPrompts):
                key, value = (TakeKeys.apply(x, packed_seq_params) for x in (key, value))
                attn_mask_type, packed_seq_params = BOTTOM_RIGHT, packed_seq_params.variable_length
            options["packed_seq_params"] = packed_seq_params
            return super().forward(query, key, value, attention_mask, attn_mask_type, **options)

    return SharedPromptAttention


# In a bucket of packed sequences, the shortest length is at least this share of the longest, to which all are padded.
BUCKET_RATIO = 0.75


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with megatron-core's signature; it respects params_dtype and sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_):
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        self.weight.sequence_parallel = config.sequence_parallel
        self.zero_centred = config.layernorm_zero_centered_gamma  # the weight is stored minus one, where bf16 is finer

    def forward(self, x: Tensor) -> Tensor:
        """Use `Normalise` on the CPU, where torch has no fused kernel."""
        weight = 1 + self.weight if self.zero_centred else self.weight
        if x.is_cpu:
            return Normalise.apply(x, weight, self.eps)
        return F.rms_norm(x, x.shape[-1:], weight, self.eps)


class LatentNorm(RMSNorm):
    """The norm of latent attention's latents. DeepSeek's code and transformers give it this eps, whatever the
    configuration says."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_):
        super().__init__(config, hidden_size, eps=1e-6)


class WholeNorm(MegatronModule):
    """The norm of MiniMax-M2's queries, and of its keys: one RMS norm over all heads of a token (MiniMax-M2's code,
    `qk_norm_type: per_layer`), where other families have one for each head.

        y = x / sqrt(mean(x^2) + eps) * w, the mean over heads and their dimensions

    A tensor-parallel rank has some of the `heads` and the weights of these; sums of squares are added up over ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, heads: int):
        super().__init__(config)
        self.width, self.eps = heads * hidden_size, eps
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        own = self.width // config.tensor_model_parallel_size
        self.heads_weight = torch.nn.Parameter(torch.ones(own, dtype=config.params_dtype, device=device))
        tensor_parallel.set_tensor_model_parallel_attributes(self.heads_weight, True, 0, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, heads, d]"""
        exact = x.float()
        squares = tensor_parallel.reduce_from_tensor_model_parallel_region(exact.square().sum((-2, -1), keepdim=True))
        squares = tensor_parallel.copy_to_tensor_model_parallel_region(squares)  # each rank's output needs all
        normed = exact * torch.rsqrt(squares / self.width + self.eps)
        return normed.to(x.dtype) * self.heads_weight.view(x.shape[-2:])

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """Heads are split over tensor-parallel ranks."""
        state, axes = self.state_dict(prefix="", keep_vars=True), {"heads_weight": 0}
        return make_sharded_tensors_for_checkpoint(state, prefix, axes, sharded_offsets)


@functools.lru_cache(maxsize=8)
def buckets(cu_seqlens: tuple[int, ...], device: torch.device) -> tuple[list[Tensor], Tensor]:
    """Group packed sequences into buckets of similar length, each padded to its longest.

    Returns for each bucket the packed position [n, longest] of every cell (padding repeats the sequence's last token),
    and [T] the index of each packed token in the concatenated flattened buckets.
    """
    spans = [(b - a, a) for a, b in zip(cu_seqlens, cu_seqlens[1:], strict=False) if b > a]
    spans.sort(key=lambda pair: -pair[0])  # stable: sequences of one length stay in order
    groups: list[list[tuple[int, int]]] = []
    for pair in spans:
        if groups and pair[0] >= BUCKET_RATIO * groups[-1][0][0]:
            groups[-1].append(pair)
        else:
            groups.append([pair])
    cells, place, offset = [], torch.empty(cu_seqlens[-1], dtype=torch.long), 0
    for group in groups:
        length, start = torch.tensor(group).T[:, :, None]  # [n, 1] each
        column = torch.arange(group[0][0])
        cells.append(start + torch.minimum(column, length - 1))
        filled = column < length
        place[cells[-1][filled]] = offset + filled.flatten().nonzero().flatten()
        offset += filled.numel()
    return [send(index, device) for index in cells], send(place, device)


@functools.lru_cache(maxsize=2)
def context_mask(
    cu_seqlens: tuple[int, ...], cp_size: int, cp_rank: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Return [Tq, Tk]: True if this rank's query may attend to a key; keys in the order of the gathered ranks. On a GPU
    return the additive bias in `dtype`, which torch would otherwise make from the mask, and keep, in every layer."""
    lengths = torch.tensor(cu_seqlens).diff()
    sequence = segment_ids(lengths)
    position_q = zigzag(lengths, cp_size, cp_rank)
    position_k = torch.cat([zigzag(lengths, cp_size, rank) for rank in range(cp_size)])
    causal = position_q[:, None] >= position_k
    mask = send(causal & (sequence[position_q][:, None] == sequence[position_k]), device)
    if device.type == "cpu":
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=device).masked_fill(~mask, float("-inf"))


class TorchAttention(MegatronModule):
    """Causal attention with torch's scaled_dot_product_attention, as megatron-core's core attention."""

    def __init__(self, config, *, softmax_scale=None, pg_collection=None, **_):
        super().__init__(config=config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.cp_group, self.tp_group = groups.cp, groups.tp
        self.softmax_scale = softmax_scale

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """[b, heads, s, d]. `mask`: True where allowed; None: causal. Grouped queries share keys without copies."""
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.softmax_scale, enable_gqa=grouped
        )

    def attend_packed(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: tuple[int, ...]) -> Tensor:
        """[T, heads, d] of concatenated sequences -> [T, heads * d]. The causal mask also hides padding."""
        assert cu_seqlens[-1] == len(q), f"{cu_seqlens[-1]} tokens in sequences, {len(q)} in the micro-batch"
        cells, place = buckets(cu_seqlens, q.device)
        if len(cells) == 1 and cells[0].numel() == len(q):  # all of one length: nothing to gather
            parts = (x.unflatten(0, cells[0].shape).transpose(1, 2) for x in (q, k, v))
            return self.attend(*parts).transpose(1, 2).flatten(0, 1).flatten(1)
        v = v.contiguous() if v.is_cpu else v  # a part of each token, of which a CPU takes rows slowly
        outs = [self.attend(*(rows(x, index) for x in (q, k, v))) for index in cells]
        return torch.cat([out.transpose(1, 2).flatten(0, 1).flatten(1) for out in outs]).index_select(0, place)

    def attend_shared(self, q: Tensor, k: Tensor, v: Tensor, shared: SharedPrompts) -> Tensor:
        """[T, heads, d] -> [T, heads * d]"""
        assert shared.segments[-1] == len(q), f"{shared.segments[-1]} tokens in segments, {len(q)} in the micro-batch"
        if not q.is_cpu or q.shape[-1] != v.shape[-1]:  # the CPU's kernel takes heads of one size
            return attend_gathered(q, k, v, shared, self.softmax_scale).flatten(1)
        cells, places = buckets(shared.segments, q.device)
        return SplitAttention.apply(q, k, v, cells, places, shared.groups, self.softmax_scale).flatten(1)

    def attend_over_context(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: tuple[int, ...]) -> Tensor:
        """This rank's queries over every rank's keys; [s, b, heads, d] -> [s, b, heads * d]."""
        k, v = (tensor_parallel.gather_from_sequence_parallel_region(x, group=self.cp_group) for x in (k, v))
        mask = context_mask(cu_seqlens, self.cp_group.size(), self.cp_group.rank(), q.device, q.dtype)
        return self.attend_padded(q, k, v, mask)

    def attend_padded(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """[s, b, heads, d] -> [s, b, heads * d]"""
        out = self.attend(*(x.permute(1, 2, 0, 3) for x in (q, k, v)), mask)
        return out.permute(2, 0, 1, 3).flatten(2)

    def forward(
        self,
        query: Tensor,  # [s, b, heads, d], or [T, heads, d] when packed
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,  # megatron-core's: True = masked out
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params=None,
    ) -> Tensor:
        if isinstance(packed_seq_params, SharedPrompts):
            return self.attend_shared(query, key, value, packed_seq_params)
        if packed_seq_params is not None:
            ends = tuple(packed_seq_params.cu_seqlens_q.tolist())
            if self.cp_group.size() == 1:
                return self.attend_packed(query, key, value, ends)
            return self.attend_over_context(*(x[:, None] for x in (query, key, value)), ends)[:, 0]
        if self.cp_group.size() > 1:
            assert attention_mask is None, "context parallelism supports causal attention only"
            return self.attend_over_context(query, key, value, (0, query.shape[0] * self.cp_group.size()))
        return self.attend_padded(query, key, value, None if attention_mask is None else ~attention_mask)
