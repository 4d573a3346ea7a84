"""A tiny configuration of each model family, for tests of all that a family needs."""

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DeepseekV3Config,
    Gemma3TextConfig,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    MiniMaxM2Config,
    MistralConfig,
    Olmo2Config,
    Olmo3Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from megatron_rft.conversion import language_config
from tests.shapes import sizes

SIZES = sizes(4, 32, 4, 2, 48, max_position_embeddings=128, initializer_range=0.2)
SIZES |= dict(vocab_size=99)  # not a multiple of anything: padded rows must not count
SIZES |= dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)
SIGMOID = dict(
    n_routed_experts=8,
    num_experts_per_tok=4,
    n_shared_experts=1,
    first_k_dense_replace=1,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
    moe_intermediate_size=16,
)
LATENT = SIZES | dict(num_key_value_heads=4, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=12)
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, beta_fast=32.0, beta_slow=1.0)
YARN |= dict(original_max_position_embeddings=32)
DEFAULT = dict(rope_type="default", rope_theta=1e4)

DELTA = dict(
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    layer_types=["linear_attention", "full_attention"] * 2,
    rope_parameters=DEFAULT | dict(partial_rotary_factor=0.5),
)
GATED_EXPERTS = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=20)
WITHOUT_FFN = {name: size for name, size in SIZES.items() if name != "intermediate_size"}


def transformers_class(config):
    return AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM


IMAGE = 91  # the token of an image


def seeing(kind: str, text: dict, tower: dict):
    """A language model's configuration with that of its tower."""
    tower = tower | dict(
        depth=3, hidden_size=32, num_heads=2, in_channels=3, spatial_merge_size=2, temporal_patch_size=2
    )
    return language_config(
        AutoConfig.for_model(
            kind,
            text_config=SIZES | text,
            vision_config=tower | dict(intermediate_size=48, out_hidden_size=(SIZES | text)["hidden_size"]),
            image_token_id=IMAGE,
            video_token_id=92,
            vision_start_token_id=93,
            vision_end_token_id=94,
            tie_word_embeddings=kind == "qwen3_vl",
        )
    )


WINDOWS = dict(sliding_window=7, layer_types=["sliding_attention", "full_attention"] * 2)

FAMILIES = {
    "mistral": MistralConfig(**SIZES, head_dim=24, sliding_window=None),
    "glm4_moe": Glm4MoeConfig(
        **SIZES,
        **SIGMOID,
        head_dim=16,
        attention_bias=True,
        use_qk_norm=True,
        rope_parameters=DEFAULT | dict(partial_rotary_factor=0.5),
    ),
    # with a compressed query and YaRN, as DeepSeek-V3; without both, as Moonlight; Kimi-K2 has one group
    "deepseek_v3": DeepseekV3Config(
        **LATENT, **SIGMOID, q_lora_rank=24, rope_parameters=YARN | dict(mscale=1.0, mscale_all_dim=1.0)
    ),
    "moonlight": DeepseekV3Config(
        **LATENT, **SIGMOID | dict(n_group=1, topk_group=1), q_lora_rank=None, rope_parameters=DEFAULT
    ),
    "glm4_moe_lite": Glm4MoeLiteConfig(
        **LATENT,
        **SIGMOID | dict(n_group=1, topk_group=1),
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        q_lora_rank=24,
        rope_parameters=DEFAULT,
    ),
    "qwen3_5": Qwen3_5TextConfig(**SIZES, **DELTA),
    "qwen3_5_moe": Qwen3_5MoeTextConfig(**WITHOUT_FFN, **DELTA, **GATED_EXPERTS),
    "qwen3_next": Qwen3NextConfig(**SIZES, **DELTA, **GATED_EXPERTS),
    "minimax_m2": MiniMaxM2Config(
        **SIZES,
        head_dim=16,
        num_local_experts=8,
        num_experts_per_tok=3,
        rope_parameters=DEFAULT | dict(partial_rotary_factor=0.5),
    ),
    "gemma3_text": Gemma3TextConfig(
        **SIZES,
        **WINDOWS,
        head_dim=16,
        query_pre_attn_scalar=24,
        tie_word_embeddings=False,
        rope_parameters=dict(
            full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1e6), sliding_attention=DEFAULT
        ),
    ),
    "olmo2": Olmo2Config(**SIZES, rope_parameters=YARN),
    "olmo3": Olmo3Config(**SIZES, **WINDOWS, rope_parameters=dict(full_attention=YARN, sliding_attention=DEFAULT)),
    "gpt_oss": GptOssConfig(
        **SIZES,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=7,
        rope_parameters=YARN | dict(truncate=False),
    ),
}
TOWERS = {
    "qwen2_5_vl": dict(patch_size=4, window_size=16, fullatt_block_indexes=[1]),
    "qwen3_vl": dict(patch_size=4, num_position_embeddings=36, deepstack_visual_indexes=[0, 1]),
}
TOWERS["qwen3_vl_moe"] = TOWERS["qwen3_vl"]
MIXTURE = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, mlp_only_layers=[2])
MIXTURE |= dict(norm_topk_prob=True)  # as published; vLLM reads it
NARROW = {
    "qwen2_5_vl": dict(rope_parameters=DEFAULT | dict(mrope_section=[1, 2, 1])),
    "qwen3_vl": dict(num_hidden_layers=8, head_dim=16, rope_parameters=DEFAULT | dict(mrope_section=[4, 2, 2])),
}
NARROW["qwen3_vl_moe"] = NARROW["qwen3_vl"] | MIXTURE
WIDE = {  # vLLM's CPU build has no attention with narrower heads
    "qwen2_5_vl": dict(hidden_size=128, rope_parameters=DEFAULT | dict(mrope_section=[4, 6, 6])),
    "qwen3_vl": dict(head_dim=32, rope_parameters=DEFAULT | dict(mrope_section=[8, 4, 4])),
}
WIDE["qwen3_vl_moe"] = WIDE["qwen3_vl"] | MIXTURE | dict(moe_intermediate_size=64)
# models that read images
SEEING, SEEING_WIDE = (
    {kind: seeing(kind, texts[kind], tower) for kind, tower in TOWERS.items()} for texts in (NARROW, WIDE)
)
