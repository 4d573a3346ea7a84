"""Names and layouts of Hugging Face and megatron-core, on numbers small enough to check by hand."""

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from megatron_rft.conversion import Mapping, hf_shapes
from megatron_rft.conversion.folder import whole_config
from megatron_rft.families.tables import family_of
from megatron_rft.utils.errors import DataError
from tests.families import FAMILIES, SEEING, transformers_class
from tests.shapes import SMALL

SIZES = SMALL | dict(hidden_size=8, intermediate_size=12, head_dim=2)
MIXTURE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=6, mlp_only_layers=[0])
FUSED = "self_attention.linear_qkv.layer_norm_weight"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("embedding.word_embeddings.weight", ["model.embed_tokens.weight"]),
        ("output_layer.weight", ["lm_head.weight"]),
        ("value_head.weight", ["score.weight"]),
        (
            "decoder.layers.1.self_attention.linear_qkv.weight",
            [f"model.layers.1.self_attn.{x}_proj.weight" for x in "qkv"],
        ),
        ("decoder.layers.1.input_layernorm.weight", ["model.layers.1.input_layernorm.weight"]),
        (
            "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight",
            ["model.layers.1.input_layernorm.weight"],
        ),
        ("decoder.layers.0.mlp.linear_fc1.layer_norm_weight", ["model.layers.0.post_attention_layernorm.weight"]),
        ("decoder.layers.0.mlp.linear_fc2.weight", ["model.layers.0.mlp.down_proj.weight"]),
        ("decoder.layers.1.mlp.router.weight", ["model.layers.1.mlp.gate.weight"]),
        (
            "decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight",
            ["model.layers.1.mlp.experts.3.gate_proj.weight", "model.layers.1.mlp.experts.3.up_proj.weight"],
        ),
    ],
)
def test_names_of_both_specs(name, expected):
    assert Mapping(Qwen3MoeConfig(**SIZES, **MIXTURE)).hf_names(name) == expected


def test_a_tied_output_matrix_is_the_embedding():
    mapping = Mapping(Qwen3Config(**SIZES, tie_word_embeddings=True))
    assert mapping.hf_names("output_layer.weight") == ["model.embed_tokens.weight"]


def test_qkv_is_interleaved_by_query_group():
    """4 heads of 2 channels in 2 groups: q0 q1 k0 v0, then q2 q3 k1 v1."""
    name, mapping = "decoder.layers.0.self_attention.linear_qkv.bias", Mapping(Qwen2Config(**SIZES))
    q, k, v = torch.arange(8), torch.arange(100, 104), torch.arange(200, 204)
    whole = mapping.merge(name, [q, k, v])
    assert whole.tolist() == [0, 1, 2, 3, 100, 101, 200, 201, 4, 5, 6, 7, 102, 103, 202, 203]
    assert all(torch.equal(a, b) for a, b in zip(mapping.split(name, whole), (q, k, v), strict=True))


@pytest.mark.parametrize("family", [name for name, config in FAMILIES.items() if FUSED in family_of(config).layer])
def test_a_norm_in_front_of_qkv_is_one_tensor(family):
    """Transformer Engine's layer has the norm's weight; it has no heads."""
    name, mapping = f"decoder.layers.0.{FUSED}", Mapping(FAMILIES[family])
    weight = torch.arange(32)
    assert mapping.merge(name, [weight]) is weight
    assert [part.tolist() for part in mapping.split(name, weight)] == [weight.tolist()]


def test_gate_comes_before_up():
    name, mapping = "decoder.layers.0.mlp.linear_fc1.weight", Mapping(LlamaConfig(**SIZES))
    gate, up = torch.zeros(12, 8), torch.ones(12, 8)
    whole = mapping.merge(name, [gate, up])
    assert whole[:12].sum() == 0 and whole[12:].sum() == 96
    assert [part.mean().item() for part in mapping.split(name, whole)] == [0.0, 1.0]


def test_shapes_are_those_of_transformers(tmp_path):
    """The names and shapes that transformers itself writes, for a config with every feature of the table."""
    from safetensors import safe_open

    for config in (
        LlamaConfig(**SIZES, tie_word_embeddings=True),
        Qwen2Config(**SIZES),
        Qwen3Config(**SIZES),
        Qwen3MoeConfig(**SIZES, **MIXTURE),
        *FAMILIES.values(),
        *SEEING.values(),
    ):
        transformers_class(config).from_config(whole_config(config)).save_pretrained(tmp_path / "written")
        with safe_open(tmp_path / "written" / "model.safetensors", "pt") as file:
            written = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        if config.model_type == "qwen3_vl_moe_text":  # published as [E, in, out], as `hf_shapes` has it
            written = {name: (s[0], *s[:0:-1]) if ".experts." in name else s for name, s in written.items()}
        assert hf_shapes(config) == written, config.model_type


def test_another_family_is_refused_with_the_ones_that_are_known():
    with pytest.raises(DataError, match="'gpt2' is not supported.*qwen3_moe"):
        family_of(GPT2Config())
