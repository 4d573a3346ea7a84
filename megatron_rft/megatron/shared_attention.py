"""Attention in a packed micro-batch where responses share prompts (`packing.SharedPrompts`).

A response's token attends to all of its prompt and, causally, to its own response. On the CPU these are two calls of
torch's flash attention, whose results are merged by the logarithms of their softmax denominators l:

    out = out_own + w (out_prompt - out_own),   w = sigmoid(l_prompt - l_own),   l = log(exp l_own + exp l_prompt)

(Dao et al., arXiv:2205.14135, section 3.1.) No key is copied, the prompt's part needs no mask, and all responses of a
group are one call. Backward calls the kernel's backward for each part with the merged `out` and `l`: its softmax
weights are exp(score - l), so the gradients of the parts add up to that of the whole.

On other devices keys and values are gathered, the prompt's before those of each response, for calls with a bottom-right
causal mask. On a GPU torch's flash attention does that without a mask tensor.
"""

from itertools import pairwise
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from megatron_rft.megatron.packing import SharedPrompts

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

BOTTOM_RIGHT = SimpleNamespace(name="padding_causal_bottom_right")  # megatron-core's enumeration lacks it

# Fewer keys than this: the kernel's backward pass in bf16 takes up to four times as long as in fp32.
FEW_KEYS = 384

Cells = list[Tensor]  # per bucket of segments of similar length: [n, longest] the token of every cell


def take_rows(values: Tensor, index: Tensor) -> Tensor:
    """values[index] where `index` names some rows more than once: with a backward pass that adds up in a fixed order.
    On a CPU that is index_select's, on a GPU indexing's."""
    return values.index_select(0, index) if values.is_cpu else values[index]


class SplitAttention(torch.autograd.Function):
    """q [T, heads, d], k and v [T, kv heads, d] -> [T, heads, d], on the CPU.

    `cells` and `places` are the segments' buckets (`spec.buckets`), `groups` those of SharedPrompts."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, cells: Cells, places: Tensor, groups, scale: float | None):
        parts = [flash(*(_rows(x, index) for x in (q, k, v)), 0.0, True, scale=scale) for index in cells]
        out = torch.cat([out.transpose(1, 2).flatten(0, 1) for out, _ in parts]).index_select(0, places)
        total = torch.cat([total.transpose(1, 2).flatten(0, 1) for _, total in parts]).index_select(0, places)
        for start, middle, end in groups:
            prompt, of_prompt = flash(_span(q, middle, end), *(_span(x, start, middle) for x in (k, v)), scale=scale)
            prompt, of_prompt = prompt[0].transpose(0, 1), of_prompt[0].transpose(0, 1)
            weight = torch.sigmoid(of_prompt - total[middle:end]).unsqueeze(-1)
            own = out[middle:end]
            own.copy_(torch.lerp(own.to(weight.dtype), prompt.to(weight.dtype), weight))
            total[middle:end] = torch.logaddexp(total[middle:end], of_prompt)
        ctx.save_for_backward(q, k, v, out, total)
        ctx.cells, ctx.places, ctx.groups, ctx.scale = cells, places, groups, scale
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        q, k, v, out, total = ctx.saved_tensors
        grads = _backward_in_segments(ctx, grad)
        for start, middle, end in ctx.groups:
            ours = [_span(x, middle, end) for x in (grad, q, out)]
            prompts = [_span(x, start, middle) for x in (k, v)]
            found = _flash_backward(ours[0], ours[1], *prompts, ours[2], total[middle:end].t()[None], False, ctx.scale)
            for each, part, where in zip(grads, found, ((middle, end), (start, middle), (start, middle)), strict=True):
                each[slice(*where)] += part[0].transpose(0, 1)
        return *(each.to(q.dtype) for each in grads), None, None, None, None


def _flash_backward(grad, q: Tensor, k: Tensor, v: Tensor, out, total: Tensor, causal: bool, scale: float | None):
    """The kernel's, in fp32 where it is slow in bf16."""
    if k.shape[2] < FEW_KEYS and k.dtype == torch.bfloat16:
        grad, q, k, v, out = (x.float() for x in (grad, q, k, v, out))
    return flash_backward(grad, q, k, v, out, total, 0.0, causal, scale=scale)


def _backward_in_segments(ctx, grad: Tensor) -> list[Tensor]:
    """[gradient of q, of k, of v] of the causal part, each [T, heads, d]. A padding cell repeats its segment's last
    token: no gradient comes into it, and so none out of it."""
    q, k, v, out, total = ctx.saved_tensors
    real = torch.zeros(sum(index.numel() for index in ctx.cells), dtype=torch.bool)
    real[ctx.places] = True
    found, offset = [], 0
    for index in ctx.cells:
        padding = ~real[offset : offset + index.numel()].view(index.shape)
        offset += index.numel()
        wanted = _rows(grad, index).masked_fill(padding[:, None, :, None], 0)
        sums = total.index_select(0, index.flatten()).unflatten(0, index.shape).transpose(1, 2)
        parts = [_rows(x, index) for x in (q, k, v, out)]
        found.append(_flash_backward(wanted, *parts, sums, True, ctx.scale))
    return [
        torch.cat([part.transpose(1, 2).flatten(0, 1) for part in parts]).index_select(0, ctx.places)
        for parts in zip(*found, strict=True)
    ]


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """[T, heads, d] and [n, longest] -> [n, heads, longest, d]"""
    return x.index_select(0, index.flatten()).unflatten(0, index.shape).transpose(1, 2)


def _span(x: Tensor, start: int, end: int) -> Tensor:
    """[T, heads, d] -> [1, heads, end - start, d]"""
    return x[start:end].transpose(0, 1)[None]


def attend_gathered(q: Tensor, k: Tensor, v: Tensor, shared: SharedPrompts, scale: float | None) -> Tensor:
    """[T, heads, d] -> [T, heads, d], on any device: one call for each segment."""
    index, ends = shared.gathered
    k, v = (take_rows(x, index) for x in (k, v))
    outs = []
    for (start, end), (first, last) in zip(pairwise(shared.segments), pairwise(ends), strict=True):
        mask = bottom_right(end - start, last - first, q.device)
        parts = [_span(q, start, end), _span(k, first, last), _span(v, first, last)]
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
                index, _ = packed_seq_params.gathered
                key, value = (take_rows(x, index) for x in (key, value))
                attn_mask_type, packed_seq_params = BOTTOM_RIGHT, packed_seq_params.variable_length
            return super().forward(
                query, key, value, attention_mask, attn_mask_type, packed_seq_params=packed_seq_params, **options
            )

    return SharedPromptAttention
