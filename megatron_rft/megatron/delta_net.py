"""Gated delta net: a layer of Qwen3-Next and Qwen3.5 instead of attention (Yang et al., arXiv:2412.06464).

Each head has a state S [key, value], a memory that is read by queries and written by keys. With decay a_t = exp(g_t),
g_t = -exp(A_log) softplus(a_t + dt_bias), and rate beta_t = sigmoid(b_t),

    u_t = beta_t (v_t - a_t S_{t-1}' k_t),     S_t = a_t S_{t-1} + k_t u_t',     out_t = S_t' q_t

where q, k and v come from a projection, a short causal convolution and silu; q and k are normalised. transformers
computes a chunk of tokens at once (section 3.3), by flash-linear-attention's kernel where that is installed.

Tensor parallelism splits the key heads with their value heads. megatron-core 0.16.1's own layer needs
flash-linear-attention, also on a CPU, and refuses packed sequences.
"""

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from megatron_rft.megatron.torch_attention import RMSNorm, buckets

CHUNK = 64  # tokens, at most


class DeltaNet(MegatronModule):
    """Parameters have the names of megatron-core's layer. Rows of `in_proj` and `conv1d` are ordered by key head."""

    def __init__(self, config, submodules, layer_number=1, pg_collection=None, **_):
        super().__init__(config)
        self.tp_group = (pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp"])).tp
        ranks = config.tensor_model_parallel_size
        self.key, self.value = config.linear_key_head_dim, config.linear_value_head_dim
        self.heads, all_values = config.linear_num_key_heads // ranks, config.linear_num_value_heads
        self.each = all_values // config.linear_num_key_heads  # value heads of a key head
        # of a key head: queries, keys, values; gates, rates, decays
        self.rows = [self.key, self.key, self.each * self.value, self.each * self.value, self.each, self.each]
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        like = {"dtype": config.params_dtype, "device": device}
        self.dt_bias, self.A_log = (torch.nn.Parameter(torch.zeros(self.heads * self.each, **like)) for _ in range(2))
        options = {"config": config, "bias": False, "skip_bias_add": False, "is_expert": False}
        hidden, all_rows = config.hidden_size, config.linear_num_key_heads * sum(self.rows)
        inwards = options | {"init_method": config.init_method, "gather_output": False}
        self.in_proj = build_module(submodules.in_proj, hidden, all_rows, **inwards)
        channels, kernel = self.heads * sum(self.rows[:3]), config.linear_conv_kernel_dim
        self.conv1d = torch.nn.Conv1d(channels, channels, kernel, groups=channels, bias=False, **like)
        self.out_norm = RMSNorm(config, self.value, eps=config.layernorm_epsilon)
        self.out_norm.zero_centred = False
        outwards = options | {"init_method": config.output_layer_init_method, "input_is_parallel": True}
        self.out_proj = build_module(submodules.out_proj, all_values * self.value, hidden, **outwards)
        for parameter in (self.dt_bias, self.A_log, self.conv1d.weight):
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)

    def forward(self, hidden_states, attention_mask=None, packed_seq_params=None, **_):
        """[s, b, hidden] -> the same, and no bias. Padding on the right changes nothing before it."""
        rows, _ = self.in_proj(hidden_states)
        parts = rows.unflatten(-1, (self.heads, -1)).split([sum(self.rows[:3]), *self.rows[3:]], -1)
        mixed, gate, beta, decay = (part.flatten(2) for part in parts)  # [s, b, .]
        if packed_seq_params is None:
            out = self.sequences(*(x.transpose(0, 1) for x in (mixed, beta, decay))).transpose(0, 1)
        else:
            out = self.packed(mixed[:, 0], beta[:, 0], decay[:, 0], packed_seq_params)[:, None]
        out = self.out_norm(out.to(gate.dtype)).float() * F.silu(gate.unflatten(-1, (-1, self.value)).float())
        return self.out_proj(out.to(gate.dtype).flatten(2))

    def packed(self, mixed: Tensor, beta: Tensor, decay: Tensor, packed) -> Tensor:
        """[T, .] of concatenated sequences -> [T, heads, value], in buckets of similar length."""
        cells, place = buckets(tuple(packed.cu_seqlens_q.tolist()), mixed.device)
        outs = []
        for index in cells:
            rows = (x.index_select(0, index.flatten()).unflatten(0, index.shape) for x in (mixed, beta, decay))
            outs.append(self.sequences(*rows).flatten(0, 1))
        return torch.cat(outs).index_select(0, place)

    def sequences(self, mixed: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
        """[n, s, .] -> [n, s, heads, value]"""
        from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule as delta_rule

        kernel = self.conv1d.kernel_size[0]
        mixed = F.silu(self.conv1d(F.pad(mixed.mT, (kernel - 1, 0)))).mT
        q, k, v = mixed.unflatten(-1, (self.heads, -1)).split(self.rows[:3], -1)
        q, k = (x.repeat_interleave(self.each, 2) for x in (q, k))
        v = v.unflatten(-1, (self.each, self.value)).flatten(2, 3)
        g = -self.A_log.float().exp() * F.softplus(decay.float() + self.dt_bias)
        chunk = min(CHUNK, mixed.shape[1])
        return delta_rule(q, k, v, g, beta.sigmoid(), chunk_size=chunk, use_qk_l2norm_in_kernel=True)[0]

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """The default, but these parameters are split over tensor-parallel ranks."""
        own = {"dt_bias": self.dt_bias, "A_log": self.A_log, "conv1d.weight": self.conv1d.weight}
        groups = {"tp_group": self.tp_group, "dp_cp_group": metadata["dp_cp_group"]}
        split = make_sharded_tensors_for_checkpoint(own, prefix, dict.fromkeys(own, 0), sharded_offsets, **groups)
        return super().sharded_state_dict(prefix, sharded_offsets, metadata) | split
