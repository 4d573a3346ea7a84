"""The norm of MiniMax-M2's queries, and of its keys: one RMS norm over all heads of a token (MiniMax-M2's code,
`qk_norm_type: per_layer`), where other families have one for each head.

    y = x / sqrt(mean(x^2) + eps) * w, the mean over heads and their dimensions

A tensor-parallel rank has some of the heads and the weights of these; the sums of squares are added up over the ranks.
"""

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor


class WholeNorm(MegatronModule):
    """`heads`: of all ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, heads: int):
        super().__init__(config)
        self.width, self.eps = heads * hidden_size, eps
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        own = self.width // config.tensor_model_parallel_size
        self.heads_weight = torch.nn.Parameter(torch.ones(own, dtype=config.params_dtype, device=device))
        set_tensor_model_parallel_attributes(self.heads_weight, True, 0, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, heads, d]"""
        exact = x.float()
        squares = reduce_from_tensor_model_parallel_region(exact.square().sum((-2, -1), keepdim=True))
        squares = copy_to_tensor_model_parallel_region(squares)  # each rank's output depends on the whole sum
        normed = exact * torch.rsqrt(squares / self.width + self.eps)
        return normed.to(x.dtype) * self.heads_weight.view(x.shape[-2:])

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """Heads are split over tensor-parallel ranks."""
        state, axes = self.state_dict(prefix="", keep_vars=True), {"heads_weight": 0}
        return make_sharded_tensors_for_checkpoint(state, prefix, axes, sharded_offsets)
