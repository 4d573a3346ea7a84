"""Attention with a sliding window, attention sinks, or both: gpt-oss (OpenAI, arXiv:2508.10925, section 2.2).

With a window of W tokens, token i attends to the tokens i - W + 1 ... i. A sink is a logit per head, a parameter, that
takes part in the softmax and has no value (Xiao et al., arXiv:2309.17453, as a parameter):

    out_i = sum_j exp(s_ij) v_j / (exp(sink) + sum_j exp(s_ij))

Here it is one more key: its score is the sink, its value zero. Transformer Engine has both in its fused kernels, under
the same options of the configuration and with the same parameter.
"""

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor

from megatron_rft.megatron.torch_attention import TorchAttention


class SinkAttention(TorchAttention):
    def __init__(self, config, *, layer_number: int = 1, softmax_scale=None, pg_collection=None, **_):
        super().__init__(config, softmax_scale=softmax_scale, pg_collection=pg_collection)
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] + 1 if windowed else None
        self.softmax_offset = None
        if config.softmax_type == "learnable":
            device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype, device=device))
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """[b, heads, s, d]. `mask`: True where allowed; None: causal."""
        if mask is None and self.window:
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril().triu(1 - self.window)
        if self.softmax_offset is None:
            return super().attend(q, k, v, mask)
        if mask is None:
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        scores = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(~mask, float("-inf"))
        sinks = self.softmax_offset.to(q.dtype)[None, :, None, None].expand(*q.shape[:3], 1)
        bias = torch.cat([scores.expand(*q.shape[:3], k.shape[2]), sinks], -1)  # [b, heads, s, keys + 1]
        return super().attend(q, F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1)), bias)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """Heads are split over tensor-parallel ranks."""
        state, axes = self.state_dict(prefix="", keep_vars=True), {"softmax_offset": 0}
        groups = {"tp_group": self.tp_group, "dp_cp_group": metadata["dp_cp_group"]}
        return make_sharded_tensors_for_checkpoint(state, prefix, axes, sharded_offsets, **groups)
