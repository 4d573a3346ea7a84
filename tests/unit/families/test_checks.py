"""Configurations and layouts that are refused, by plan as well: before torch is imported."""

import copy
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers

import megatron_rft
from megatron_rft.config.sections import Megatron
from megatron_rft.conversion import load_config
from megatron_rft.families.checks import rope, why_unsupported
from megatron_rft.families.shapes import hf_shapes, of_json
from megatron_rft.families.tables import FAMILIES as TABLES
from megatron_rft.families.tables import READ_BY
from megatron_rft.plan.layout import Layout, check_layout, problems
from megatron_rft.plan.model_shape import ModelShape, read_shape
from megatron_rft.utils.errors import ConfigError, DataError
from tests.families import FAMILIES as TEXT
from tests.families import SEEING, YARN

FAMILIES = TEXT | SEEING
SCALED = YARN | dict(mscale=1.0, mscale_all_dim=1.0)


def test_a_published_file_that_leaves_out_what_transformers_takes_for_granted(tmp_path):
    """Gemma 3 of 4B, as published, beside what transformers makes of the same file."""
    text = dict(hidden_size=2560, intermediate_size=10240, num_hidden_layers=34, sliding_window=1024)
    text |= dict(model_type="gemma3_text", rope_scaling=dict(factor=8.0, rope_type="linear"))
    content = dict(model_type="gemma3", architectures=["Gemma3ForConditionalGeneration"], text_config=text)
    (tmp_path / "config.json").write_text(json.dumps(content))
    config, shape = load_config(tmp_path), read_shape(tmp_path)
    assert hf_shapes(of_json(content)) == hf_shapes(config)
    assert vars(shape) == vars(ModelShape(config.to_dict()))
    attention, norms = 2560 * (2 * 8 + 2 * 4) * 256, 4 * 2560 + 2 * 256
    assert shape.whole() == 262208 * 2560 + 34 * (attention + 3 * 2560 * 10240 + norms) + 2560
    assert [rope(config, kind)["rope_theta"] for kind in ("full_attention", "sliding_attention")] == [1e6, 1e4]


def test_rope_parameters_of_all_layers_are_those_of_layers_with_a_window_too():
    flat = dict(rope_type="yarn", rope_theta=5e4, factor=4.0)
    config = SimpleNamespace(model_type="olmo3", rope_parameters=flat)
    assert rope(config, "full_attention") == rope(config, "sliding_attention") == flat | {"partial_rotary_factor": 1.0}
    config = SimpleNamespace(model_type="olmo3", rope_scaling=dict(rope_type="yarn", factor=4.0), rope_theta=5e4)
    assert [rope(config, f"{kind}_attention")["rope_type"] for kind in ("full", "sliding")] == ["yarn", "default"]


@pytest.mark.parametrize(
    ("family", "field", "value", "words"),
    [
        ("mistral", "sliding_window", 8, "sliding_window to null"),
        ("qwen3_5_moe", "norm_topk_prob", False, "norm_topk_prob: false, which the code of qwen3_5_moe_text models"),
        ("mistral", "partial_rotary_factor", 0.5, "partial_rotary_factor: 0.5, which the code of mistral models"),
        ("glm4_moe", "norm_topk_prob", False, "norm_topk_prob"),
        ("glm4_moe", "num_experts_per_tok", 2, "topk_group"),
        ("deepseek_v3", "rope_interleave", False, "rope_interleave"),
        ("deepseek_v3", "attention_bias", True, "attention_bias"),
        ("deepseek_v3", "rope_parameters", SCALED | {"attention_factor": 1.2}, "attention_factor 1.2"),
        ("minimax_m2", "num_experts_per_tok", 1, "num_experts_per_tok 1"),
        ("deepseek_v3", "topk_method", "greedy", "topk_method"),
        ("deepseek_v3", "quantization_config", {"quant_method": "fp8"}, "quantised by fp8"),
        ("gemma3_text", "final_logit_softcapping", 30.0, "final_logit_softcapping 30.0"),
        ("gemma3_text", "hidden_activation", "silu", "hidden_activation 'silu'"),
        ("gemma3_text", "use_bidirectional_attention", True, "use_bidirectional_attention True"),
        ("olmo3", "attention_bias", True, "attention_bias: true"),
        ("olmo3", "sliding_window", None, "without sliding_window"),
        ("olmo3", "rope_parameters", {"sliding_attention": {"rope_type": "longrope"}}, "rope_type 'longrope'"),
        ("gpt_oss", "swiglu_alpha", 1.0, "swiglu_alpha"),
        ("mistral", "logits_scaling", 8.0, "logits_scaling: 8.0, which the code of mistral models does not read"),
        ("glm4_moe", "residual_multiplier", 0.22, "residual_multiplier: 0.22"),
        ("gpt_oss", "sliding_window", None, "without sliding_window"),
        ("qwen2_5_vl", "rope_parameters", {"mrope_section": [1, 2, 2]}, "mrope_section .1, 2, 2. with heads of 8"),
        ("qwen2_5_vl", "rope_parameters", {"mrope_section": [1, 2, 1], "mrope_interleaved": True}, "does not read"),
        ("qwen3_5", "layer_types", ["chunked_attention"] * 4, "layer_types chunked_attention"),
    ],
)
def test_what_cannot_be_represented_is_refused(tmp_path, family, field, value, words):
    config = copy.deepcopy(FAMILIES[family])
    assert why_unsupported(config) == ""
    content = config.to_dict() | {field: value}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=words):
        read_shape(tmp_path)


def test_a_window_counts_in_qwen3_moe_where_it_is_used():
    """There it is one of all layers: no layer_types say so."""
    config = SimpleNamespace(**transformers.Qwen3MoeConfig(num_hidden_layers=2).to_dict() | {"sliding_window": 4096})
    assert why_unsupported(config) == ""
    config.use_sliding_window = True
    assert "sliding-window attention (set use_sliding_window to false" in why_unsupported(config)


def test_a_multiplier_of_one_is_none():
    assert why_unsupported(SimpleNamespace(**FAMILIES["mistral"].to_dict() | {"embedding_multiplier": 1.0})) == ""


def test_an_option_that_the_familys_code_does_not_read_is_refused():
    """Set instead of `sliding_window: null`, it would leave transformers' windows as they are."""
    config = SimpleNamespace(**FAMILIES["mistral"].to_dict() | {"sliding_window": 8, "use_sliding_window": False})
    assert "use_sliding_window: false, which the code of mistral models does not read" in why_unsupported(config)
    config.sliding_window = None  # both say the same
    assert why_unsupported(config) == ""


@pytest.mark.parametrize("family", TABLES)
def test_which_options_a_familys_code_reads(family):
    """The table is what transformers' source says."""
    folder = Path(transformers.models.__path__[0], family.removesuffix("_text"))
    source = "".join(path.read_text() for path in (*folder.glob("modeling_*.py"), *folder.glob("configuration_*.py")))
    read = {option for option in READ_BY if re.search(rf"\b{option}\b", source)}
    listed = {option for option, families in READ_BY.items() if family in families}
    assert read == listed, (
        f"READ_BY in families/tables.py: add {family} to {read - listed}, remove from {listed - read}"
    )


# of how transformers computes, of padding, of its loss, and of vision towers, which are transformers' own modules
ELSEWHERE = {"_attn_implementation", "use_cache", "pad_token_id", "num_heads", "mm_tokens_per_image"}
ELSEWHERE |= {"fullatt_block_indexes", "output_router_logits", "router_aux_loss_coef", "router_jitter_noise"}
NO_DROPOUT = re.compile(r"\w*dropout|\w+_pdrop")  # in no family, whatever its configuration says


def read_by_transformers(family: str) -> set[str]:
    """The fields of the configuration that the family's own code in transformers computes with."""
    folder = Path(transformers.models.__path__[0], family.removesuffix("_text"))
    source = "".join(path.read_text() for path in folder.glob("modeling_*.py"))
    found = re.findall(r"\bconfig(?:\.|, [\"'])(\w+)", source)
    return {name for name in found if not NO_DROPOUT.fullmatch(name)} - ELSEWHERE


def unread(family: str) -> set[str]:
    """Of these the fields that no code here names."""
    package = Path(megatron_rft.__path__[0])
    rooms = ("families", "conversion", "megatron")
    source = "".join(path.read_text() for room in rooms for path in (package / room).glob("*.py"))
    return read_by_transformers(family) - set(re.findall(r"\w+", source))


@pytest.mark.parametrize("family", TABLES)
def test_each_field_that_changes_a_familys_numbers_is_read(family):
    fields = unread(family)
    assert not fields, (
        f"transformers' code of {family} reads {fields}, and nothing here does: compute them (megatron/model.py), "
        "refuse them (families/checks.py), or say in ELSEWHERE that they change no log-prob"
    )


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("starcoder2", {"use_bias", "norm_epsilon"}),
        ("smollm3", {"no_rope_layers"}),
        ("phi3", {"original_max_position_embeddings"}),  # of longrope, which is refused, too
        ("granite", {"embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"}),
        ("cohere", {"layer_norm_eps", "logit_scale"}),
        ("seed_oss", set()),
    ],
)
def test_what_a_new_family_would_have_to_read(family, fields):
    assert unread(family) == fields


@pytest.mark.parametrize(
    ("family", "layout", "words"),
    [
        ("gpt_oss", Layout(2, 1, 1, 2, 1, 1), "attention sinks and windows"),
        ("gemma3_text", Layout(2, 1, 1, 2, 1, 1), "the model has windows"),
        ("qwen3_5", Layout(2, 1, 1, 2, 1, 1), "delta nets pass a state"),
        ("gpt_oss", Layout(2, 2, 1, 1, 1, 2), "experts have biases"),
        ("qwen3_5", Layout(4, 4, 1, 1, 1, 4), "TP 4 is above the 2 kv heads"),
        ("olmo2", Layout(4, 4, 1, 1, 1, 4), "TP 4 is above the 2 kv heads"),
        ("glm4_moe", Layout(2, 2, 1, 1, 1, 1), "needs expert_model_parallel_size above 1"),
    ],
)
def test_a_layout_that_a_family_cannot_have(family, layout, words):
    assert any(words in problem for problem in problems(layout, ModelShape(FAMILIES[family].to_dict())))


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_5"])
def test_tensor_parallelism_that_needs_sequence_parallelism(family):
    shape = ModelShape(FAMILIES[family].to_dict())
    check_layout(Megatron(tensor_model_parallel_size=2, sequence_parallel=True), 2, shape)
    with pytest.raises(ConfigError, match="with tensor parallelism needs it: set it to true"):
        check_layout(Megatron(tensor_model_parallel_size=2), 2, shape)


@pytest.mark.parametrize("family", FAMILIES)
def test_config_json_gives_the_shapes_of_transformers_configuration(family):
    """The plan reads the file, conversion the object; a published folder may have the text model's fields inside."""
    config = FAMILIES[family]
    content = config.to_dict()
    assert hf_shapes(of_json(content)) == hf_shapes(config)
    wrapped = {"model_type": "a wrapper", "text_config": content, "vision_config": {"hidden_size": 7}}
    assert hf_shapes(of_json(wrapped)) == hf_shapes(config)
