"""The layer spec: Transformer Engine's layers if it is installed and there is a GPU, else torch's attention and norm.
Torch's attention also stands in where Transformer Engine has no fused kernel (`uses_fused_attention`).

Both use megatron-core's ModuleSpec; nothing is patched.
"""

import copy
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from megatron_rft.families.tables import INPUT_NORM, Family
from megatron_rft.megatron.delta_net import DeltaNet
from megatron_rft.megatron.local_attention import LocalAttention, PostNorm
from megatron_rft.megatron.sink_attention import SinkAttention
from megatron_rft.megatron.torch_attention import LatentNorm, RMSNorm, TorchAttention, WholeNorm, with_shared_prompts
from megatron_rft.utils.device import has_fused_attention
from megatron_rft.utils.device import has_transformer_engine as is_installed


def has_transformer_engine() -> bool:
    return torch.cuda.is_available() and is_installed()


def uses_fused_attention(config: TransformerConfig) -> bool:
    """Whether Transformer Engine's attention is used: if the recipe names its kernel, or if it has a fused one, which
    none is in fp32."""
    if config.attention_backend is not AttnBackend.auto:
        return True
    return config.params_dtype != torch.float32 and has_fused_attention(torch.cuda.get_device_capability())


def block_spec(
    config: TransformerConfig, vp_stage: int | None, family: Family, window_scale: float | None
) -> TransformerBlockSubmodules:
    """Return the layers of this rank's pipeline stage (and virtual stage `vp_stage`), dense or mixture of experts.
    `window_scale`: of the scores in layers with a window, in a `local` family."""
    with_te = has_transformer_engine()
    block = get_gpt_decoder_block_spec(config, with_te, normalization=config.normalization, vp_stage=vp_stage)
    if config.linear_attention_freq:
        _put_delta_nets(block, config, vp_stage)
    for layer in block.layer_specs:
        (_with_transformer_engine if with_te else _with_torch)(layer.submodules, config)
        attention = layer.submodules.self_attention
        if family.whole_qk_norm:
            attention.submodules.q_layernorm = ModuleSpec(WholeNorm, params={"heads": config.num_attention_heads})
            attention.submodules.k_layernorm = ModuleSpec(WholeNorm, params={"heads": config.num_query_groups})
        if family.local:
            attention.module, attention.params["window_scale"] = LocalAttention, window_scale
        if family.post_norm:
            _add_post_norms(layer.submodules, config, family)
    if not with_te:
        block.layer_norm = RMSNorm
    return block


def _with_torch(layer: Any, config: TransformerConfig) -> None:
    """Change the submodules of a layer in the spec without Transformer Engine."""
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention = layer.self_attention.submodules
    if hasattr(attention, "core_attention"):
        attention.core_attention = own_attention(config)
    if config.multi_latent_attention:
        # Not ColumnParallelLinear: megatron-core 0.16.1 gathers its parts, and then does not add up the ranks'
        # gradients of the rotated keys.
        attention.linear_q_down_proj = attention.linear_kv_down_proj = Linear
    for name in ("q_layernorm", "k_layernorm", "kv_layernorm"):
        if config.qk_layernorm and hasattr(attention, name):
            setattr(attention, name, LatentNorm if config.multi_latent_attention else RMSNorm)
    if config.add_bias_linear:
        experts = layer.mlp.submodules
        mixture = layer.mlp.module is MoELayer
        for feed_forward in (experts.experts, experts.shared_experts) if mixture else (layer.mlp,):
            feed_forward.submodules.linear_fc2 = OwnOutput


def _put_delta_nets(block: TransformerBlockSubmodules, config: TransformerConfig, vp_stage: int | None) -> None:
    """Replace the attention of the layers that are delta nets. megatron-core shares one spec among equal layers."""
    offset = get_transformer_layer_offset(config, vp_stage=vp_stage)
    block.layer_specs = [copy.deepcopy(layer) for layer in block.layer_specs]
    for number, layer in enumerate(block.layer_specs, offset):
        if config.linear_attention_freq[number]:
            parts = layer.submodules
            old, parts.input_layernorm = parts.self_attention.submodules, RMSNorm
            column = old.linear_qkv if not has_transformer_engine() else _te_column()
            inner = SimpleNamespace(in_proj=column, out_proj=old.linear_proj)
            parts.self_attention = ModuleSpec(module=DeltaNet, submodules=inner)


def _add_post_norms(layer: Any, config: TransformerConfig, family: Family) -> None:
    """Change the submodules of a layer: norms after attention and feed-forward, and none before them where the family
    has none."""
    size = {"config": config, "hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
    layer.self_attn_bda = layer.mlp_bda = ModuleSpec(PostNorm, params=size)
    if not family.has(INPUT_NORM):
        layer.input_layernorm = layer.pre_mlp_layernorm = IdentityOp
        if has_transformer_engine():
            layer.self_attention.submodules.linear_qkv = layer.mlp.submodules.linear_fc1 = _te_column()


def _te_column() -> type:
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

    return TEColumnParallelLinear


def own_attention(config: TransformerConfig) -> type:
    """The class of torch's attention for this model."""
    return TorchAttention if config.softmax_type == "vanilla" and config.window_size is None else SinkAttention


class OwnOutput(RowParallelLinear):
    """megatron-core 0.16.1 adds an expert's bias in place to this output, which on one tensor-parallel rank is a view
    that autograd does not allow to change."""

    def forward(self, x: Tensor):
        out, bias = super().forward(x)
        return out.clone(), bias


def _with_transformer_engine(layer: Any, config: TransformerConfig) -> None:
    """The same in the spec of Transformer Engine."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    attention = layer.self_attention.submodules
    if not hasattr(attention, "core_attention"):
        return
    fused = uses_fused_attention(config)
    attention.core_attention = with_shared_prompts(TEDotProductAttention) if fused else own_attention(config)
    if config.multi_latent_attention:
        attention.q_layernorm = attention.kv_layernorm = LatentNorm  # with another eps, so not fused
        attention.linear_q_up_proj = attention.linear_kv_up_proj = _te_column()
