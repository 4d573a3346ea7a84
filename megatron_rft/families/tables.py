"""The model families: one table each, from a layer's megatron-core tensors to the Hugging Face tensors they contain.

`{a,b}` means several tensors, concatenated in that order (`conversion.mapping` has the exceptions); `{e}` is the number
of an expert. The names on the left are those of megatron-core's local spec, in the model's order. Transformer Engine's
fused norms have a second line; `megatron.weights` renames its grouped experts. A layer has those tensors of its table
whose sizes in `shapes.py` are known for it. No torch: `plan` reads the same tables.
"""

from dataclasses import dataclass, replace
from typing import Any

from megatron_rft.utils.errors import DataError

INPUT_NORM = {"input_layernorm.weight": "input_layernorm.weight"}
PROJECTION = {"self_attention.linear_proj.weight": "self_attn.o_proj.weight"}
PROJECTIONS = PROJECTION | {"self_attention.linear_qkv.weight": "self_attn.{q,k,v}_proj.weight"}
ATTENTION = INPUT_NORM | {"self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight"} | PROJECTIONS
QKV_BIAS = {"self_attention.linear_qkv.bias": "self_attn.{q,k,v}_proj.bias"}
QK_NORM = {
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
}
WHOLE_QK_NORM = {  # one norm over all heads: WholeNorm in megatron/torch_attention.py
    "self_attention.q_layernorm.heads_weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.heads_weight": "self_attn.k_norm.weight",
}
LATENT_ATTENTION = {  # keys and values from a latent vector: DeepSeek-V2, arXiv:2405.04434, section 2.1
    **INPUT_NORM,
    **PROJECTION,
    "self_attention.linear_q_proj.weight": "self_attn.q_proj.weight",
    "self_attention.linear_q_down_proj.weight": "self_attn.q_a_proj.weight",
    "self_attention.linear_q_up_proj.weight": "self_attn.q_b_proj.weight",
    "self_attention.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "self_attention.linear_kv_up_proj.weight": "self_attn.kv_b_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_a_layernorm.weight",
    "self_attention.kv_layernorm.weight": "self_attn.kv_a_layernorm.weight",
}
MLP_NORM = {
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
}
PRE_MLP_NORM = dict.fromkeys(MLP_NORM, "pre_feedforward_layernorm.weight")  # Gemma's name of the same
POST_NORM = {"self_attn_bda.weight": "post_attention_layernorm.weight"}  # megatron/local_attention.py
POST_MLP_NORM = {"mlp_bda.weight": "post_feedforward_layernorm.weight"}
DENSE = {"mlp.linear_fc1.weight": "mlp.{gate,up}_proj.weight", "mlp.linear_fc2.weight": "mlp.down_proj.weight"}
EXPERTS = {
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.experts.{e}.linear_fc1.weight": "mlp.experts.{e}.{gate,up}_proj.weight",
    "mlp.experts.{e}.linear_fc2.weight": "mlp.experts.{e}.down_proj.weight",
}
EXPERT_BIAS = {"mlp.router.expert_bias": "mlp.gate.e_score_correction_bias"}  # a buffer: chooses, does not weigh
MIXTRAL_EXPERTS = {
    "mlp.router.weight": "block_sparse_moe.gate.weight",
    "mlp.router.expert_bias": "block_sparse_moe.e_score_correction_bias",
    "mlp.experts.{e}.linear_fc1.weight": "block_sparse_moe.experts.{e}.{w1,w3}.weight",
    "mlp.experts.{e}.linear_fc2.weight": "block_sparse_moe.experts.{e}.w2.weight",
}
SHARED_EXPERTS = {
    "mlp.shared_experts.linear_fc1.weight": "mlp.shared_experts.{gate,up}_proj.weight",
    "mlp.shared_experts.linear_fc2.weight": "mlp.shared_experts.down_proj.weight",
}
SINK_ATTENTION = {
    **INPUT_NORM,
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.core_attention.softmax_offset": "self_attn.sinks",
    **PROJECTION,
    "self_attention.linear_proj.bias": "self_attn.o_proj.bias",
    "self_attention.linear_qkv.weight": "self_attn.{q,k,v}_proj.weight",
    **QKV_BIAS,
}
DELTA_NET = {  # the layer instead of attention: megatron/delta_net.py
    "self_attention.dt_bias": "linear_attn.dt_bias",
    "self_attention.A_log": "linear_attn.A_log",
    "self_attention.in_proj.weight": "linear_attn.in_proj_{qkv,z,b,a}.weight",
    "self_attention.conv1d.weight": "linear_attn.conv1d.weight",
    "self_attention.out_norm.weight": "linear_attn.norm.weight",
    "self_attention.out_proj.weight": "linear_attn.out_proj.weight",
}
NEXT_DELTA_NET = DELTA_NET | {"self_attention.in_proj.weight": "linear_attn.in_proj_{qkvz,ba}.weight"}
GATED_SHARED_EXPERT = {
    "mlp.shared_experts.gate_weight": "mlp.shared_expert_gate.weight",
    "mlp.shared_experts.linear_fc1.weight": "mlp.shared_expert.{gate,up}_proj.weight",
    "mlp.shared_experts.linear_fc2.weight": "mlp.shared_expert.down_proj.weight",
}
STACKED_EXPERTS = {  # all experts of a layer in one tensor [E, in, out]
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.experts.{e}.linear_fc1.weight": "mlp.experts.gate_up_proj",
    "mlp.experts.{e}.linear_fc2.weight": "mlp.experts.down_proj",
}
INTERLEAVED_EXPERTS = {  # gate and up row by row
    "mlp.router.weight": "mlp.router.weight",
    "mlp.router.bias": "mlp.router.bias",
    "mlp.experts.{e}.linear_fc1.weight": "mlp.experts.gate_up_proj",
    "mlp.experts.{e}.linear_fc1.bias": "mlp.experts.gate_up_proj_bias",
    "mlp.experts.{e}.linear_fc2.weight": "mlp.experts.down_proj",
    "mlp.experts.{e}.linear_fc2.bias": "mlp.experts.down_proj_bias",
}
TRANSFORMER_ENGINE = {"self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight"}


@dataclass(frozen=True)
class Family:
    """`layer`: the table. `windows`: attention may have sliding windows. `gemma`: embeddings are scaled, the
    feed-forward's gate is GELU, norms have weight 1 + w. `prefix`, `tower`: in published files, in front of the
    language model's names and of the vision tower's, if it has one."""

    architecture: str
    layer: dict[str, str]
    windows: bool = False
    gemma: bool = False
    prefix: str = "model."
    tower: str = ""

    def has(self, table: dict[str, str]) -> bool:
        return table.keys() <= self.layer.keys()

    @property
    def experts(self) -> bool:
        """Whether feed-forward layers may be mixtures of experts."""
        return "mlp.router.weight" in self.layer

    @property
    def qk_norm(self) -> bool:
        return self.has(QK_NORM) or self.whole_qk_norm

    @property
    def whole_qk_norm(self) -> bool:
        return self.has(WHOLE_QK_NORM)

    @property
    def sinks(self) -> bool:
        return self.has(SINK_ATTENTION)

    @property
    def zero_centred(self) -> bool:
        """Whether norms have weight 1 + w."""
        return self.gated or self.gemma

    @property
    def gated(self) -> bool:
        """Whether some layers are delta nets, and attention has an output gate and norms of weight 1 + w."""
        return self.has(DELTA_NET)

    @property
    def local(self) -> bool:
        """Whether layers with a window may rotate by frequencies of their own."""
        return self.windows and not self.sinks

    @property
    def post_norm(self) -> bool:
        """Whether norms follow attention and feed-forward."""
        return self.has(POST_NORM)

    @property
    def latent(self) -> bool:
        return self.has(LATENT_ATTENTION)


GEMMA = ATTENTION | QK_NORM | POST_NORM | PRE_MLP_NORM | DENSE | POST_MLP_NORM
OLMO = PROJECTIONS | WHOLE_QK_NORM | POST_NORM | DENSE | POST_MLP_NORM
GATED_ATTENTION = ATTENTION | QK_NORM
GATED_EXPERTS = MLP_NORM | DENSE | EXPERTS | GATED_SHARED_EXPERT
SIGMOID_EXPERTS = MLP_NORM | DENSE | EXPERTS | EXPERT_BIAS | SHARED_EXPERTS

FAMILIES = {  # by `model_type`
    "qwen2": Family("Qwen2ForCausalLM", ATTENTION | QKV_BIAS | MLP_NORM | DENSE),
    "qwen3": Family("Qwen3ForCausalLM", ATTENTION | QK_NORM | MLP_NORM | DENSE),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", ATTENTION | QK_NORM | MLP_NORM | DENSE | EXPERTS),
    "llama": Family("LlamaForCausalLM", ATTENTION | MLP_NORM | DENSE),
    "mistral": Family("MistralForCausalLM", ATTENTION | MLP_NORM | DENSE),
    "glm4_moe": Family("Glm4MoeForCausalLM", ATTENTION | QKV_BIAS | QK_NORM | SIGMOID_EXPERTS),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", LATENT_ATTENTION | SIGMOID_EXPERTS),
    "qwen3_next": Family("Qwen3NextForCausalLM", GATED_ATTENTION | NEXT_DELTA_NET | GATED_EXPERTS),
    "qwen3_5_text": Family("Qwen3_5ForCausalLM", GATED_ATTENTION | DELTA_NET | MLP_NORM | DENSE),
    "qwen3_5_moe_text": Family("Qwen3_5MoeForCausalLM", GATED_ATTENTION | DELTA_NET | GATED_EXPERTS),
    "gpt_oss": Family("GptOssForCausalLM", SINK_ATTENTION | MLP_NORM | INTERLEAVED_EXPERTS, windows=True),
    "minimax_m2": Family("MiniMaxM2ForCausalLM", ATTENTION | WHOLE_QK_NORM | MLP_NORM | MIXTRAL_EXPERTS),
    "gemma3_text": Family("Gemma3ForCausalLM", GEMMA, windows=True, gemma=True),
    "olmo2": Family("Olmo2ForCausalLM", OLMO),
    "olmo3": Family("Olmo3ForCausalLM", OLMO, windows=True),
    "glm4_moe_lite": Family("Glm4MoeLiteForCausalLM", LATENT_ATTENTION | SIGMOID_EXPERTS),
    "qwen2_5_vl_text": Family(
        "Qwen2_5_VLForConditionalGeneration", ATTENTION | QKV_BIAS | MLP_NORM | DENSE, tower="visual."
    ),
    "qwen3_vl_text": Family(
        "Qwen3VLForConditionalGeneration",
        ATTENTION | QK_NORM | MLP_NORM | DENSE,
        prefix="model.language_model.",
        tower="model.visual.",
    ),
}
VL, NAME = FAMILIES["qwen3_vl_text"], "Qwen3VLMoeForConditionalGeneration"
FAMILIES["qwen3_vl_moe_text"] = replace(VL, architecture=NAME, layer=VL.layer | STACKED_EXPERTS)
READ_BY = {  # options, and the families whose own code in transformers reads them
    "use_sliding_window": {"qwen2", "qwen3", "qwen3_moe", "qwen2_5_vl_text"},
    "use_qk_norm": {"glm4_moe"},
    "attention_bias": {"llama", "qwen3", "qwen3_moe", "glm4_moe", "deepseek_v3", "glm4_moe_lite", "gpt_oss", "olmo2"}
    | {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "gemma3_text", "olmo3", "qwen3_vl_text", "qwen3_vl_moe_text"},
    "norm_topk_prob": {"qwen3_moe", "qwen3_next", "glm4_moe", "deepseek_v3", "glm4_moe_lite"},
    "partial_rotary_factor": {"glm4_moe", "glm4_moe_lite", "minimax_m2"}
    | {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"},
}


def family_of(config: Any) -> Family:
    """The family of a model's configuration, by its `model_type`."""
    if family := FAMILIES.get(config.model_type):
        return family
    named = getattr(config, "architectures", None) or ["none"]
    same = [name for name, family in FAMILIES.items() if family.architecture in named]
    fix = f". If it has the layers of {same[0]}, whose architecture it names, make that its model_type" if same else ""
    what = f"model_type {config.model_type!r} is not supported (architectures: {', '.join(named)}){fix}. Supported: "
    raise DataError(f"{what}{', '.join(FAMILIES)} (docs/models.md; CONTRIBUTING.md says how to add one)")
