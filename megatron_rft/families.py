"""The model families: one table each, from a layer's megatron-core parameters to the Hugging Face tensors they contain.

`{a,b}` means several tensors, concatenated in that order; `{e}` is the number of an expert. The names on the left are
those of megatron-core's local spec. Transformer Engine's fused norms have a second line; `conversion.mapping` renames
its grouped experts. No torch: `plan` reads the same tables.
"""

from dataclasses import dataclass
from typing import Any

from megatron_rft.utils.errors import DataError

ATTENTION = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_qkv.weight": "self_attn.{q,k,v}_proj.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
}
QKV_BIAS = {"self_attention.linear_qkv.bias": "self_attn.{q,k,v}_proj.bias"}
QK_NORM = {
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
}
MLP_NORM = {
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
}
DENSE = {
    "mlp.linear_fc1.weight": "mlp.{gate,up}_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
EXPERTS = {
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.experts.{e}.linear_fc1.weight": "mlp.experts.{e}.{gate,up}_proj.weight",
    "mlp.experts.{e}.linear_fc2.weight": "mlp.experts.{e}.down_proj.weight",
}
TRANSFORMER_ENGINE = {"self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight"}


@dataclass(frozen=True)
class Family:
    """`layer`: the table. `experts`: feed-forward layers may be mixtures of experts."""

    architecture: str
    layer: dict[str, str]
    experts: bool = False

    @property
    def qkv_bias(self) -> bool:
        return QKV_BIAS.keys() <= self.layer.keys()

    @property
    def qk_norm(self) -> bool:
        return QK_NORM.keys() <= self.layer.keys()


FAMILIES = {  # by `model_type`
    "qwen2": Family("Qwen2ForCausalLM", ATTENTION | QKV_BIAS | MLP_NORM | DENSE),
    "qwen3": Family("Qwen3ForCausalLM", ATTENTION | QK_NORM | MLP_NORM | DENSE),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", ATTENTION | QK_NORM | MLP_NORM | DENSE | EXPERTS, experts=True),
    "llama": Family("LlamaForCausalLM", ATTENTION | MLP_NORM | DENSE),
}
ARCHITECTURES = {family.architecture: family for family in FAMILIES.values()}


def family_of(hf_config: Any) -> Family:
    """The family of a transformers configuration, by its `model_type`."""
    family = FAMILIES.get(hf_config.model_type)
    if family is None:
        known = ", ".join(f"{name} ({f.architecture})" for name, f in FAMILIES.items())
        raise DataError(f"model_type {hf_config.model_type!r} is not supported. Supported: {known}")
    return family


def head_dim(hf_config: Any) -> int:
    return getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads
