"""Layers with a window beside layers without: Gemma 3 (Google, arXiv:2503.19786, section 2) and OLMo 3.

A layer with a window rotates queries and keys by frequencies of its own, and its scores have a scale of their own,
where only the others extend the context by YaRN. megatron-core passes one tensor of angles to all layers, so it has
both kinds beside each other. A norm also follows attention and the feed-forward, before the residual is added:

    x = x + norm(attention(norm(x)))        Gemma 3; OLMo 2 and 3 have no norm inside
"""

import copy
from collections.abc import Callable

import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from megatron_rft.megatron.torch_attention import RMSNorm


class LocalAttention(SelfAttention):
    def __init__(self, config, submodules, layer_number: int, *args, window_scale: float, **options):
        """`window_scale`: of the scores in a layer with a window."""
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        if windowed:
            config = copy.copy(config)
            config.softmax_scale = window_scale
        super().__init__(config, submodules, layer_number, *args, **options)
        self.kind = int(windowed)

    def forward(self, *args, rotary_pos_emb: Tensor, **options):
        """`rotary_pos_emb`: [s, 1, 1, 2 d], the angles of both kinds of layers, and these again."""
        both = rotary_pos_emb.unflatten(-1, (2, 2, -1))  # [s, 1, 1, 2, kinds, d / 2]
        return super().forward(*args, rotary_pos_emb=both[..., self.kind, :].flatten(-2), **options)


class PostNorm(RMSNorm):
    """The norm after attention or the feed-forward, in the place of megatron-core's addition of bias and residual."""

    def forward(self, training: bool, fused: bool) -> Callable:
        return self.add

    def add(self, output: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        """megatron-core enables gradients here, also in a forward pass without any."""
        with torch.set_grad_enabled(output[0].requires_grad):
            return residual + super().forward(output[0])
