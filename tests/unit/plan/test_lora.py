"""Adapters that a model cannot have are refused before a run starts, and their number is right by hand."""

import json

import pytest

from megatron_rft.commands import main
from megatron_rft.config.lora import Lora
from megatron_rft.plan.layout import Layout
from megatron_rft.plan.lora import adapter_chunks, count
from megatron_rft.plan.model_shape import ModelShape
from tests import families
from tests.shapes import json_of
from tests.unit.plan.test_memory import CONFIG, path, sizes  # noqa: F401

LATENT = families.FAMILIES["deepseek_v3"].to_dict() | {"first_k_dense_replace": 9, "max_position_embeddings": 4096}
EXPERTS = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 2}


def test_the_number_of_parameters(path):  # noqa: F811
    """Hidden 8, q 8, k and v 4, feed-forward 16: rank times (in + out) of each projection, in two layers."""
    options, layout = Lora(rank=2, alpha=2.0), Layout(1, 1, 1, 1, 1, 1)
    of_layer = 2 * ((8 + 8) + 2 * (8 + 4) + (8 + 8) + 2 * (8 + 16) + (16 + 8))
    assert sum(each.count for each in adapter_chunks(sizes(path), options, layout, 0, False)[0]) == 2 * of_layer
    output = main.main(["plan", str(path), "lora.rank=2"])
    assert output == 0


@pytest.mark.parametrize(
    "config, times",
    [
        (json_of(36, 4096, 32, 8, 12_288, 151_936, 128, model_type="qwen3"), {16: 187.7, 32: 93.8, 64: 46.9}),
        (json_of(64, 5120, 64, 8, 25_600, 151_936, 128, model_type="qwen3"), {16: 244.1, 32: 122.0, 64: 61.0}),
    ],
    ids=["8B", "32B"],
)
def test_how_many_times_fewer_bytes_adapters_alone_are(config, times):
    """As docs/lora.md says; by hand from the shapes: rank times (in + out) of each projection."""
    s = ModelShape(config)
    assert {rank: round(s.whole() / count(Lora(rank=rank), s), 1) for rank in times} == times
    hidden, q, kv, ffn = s.hidden, s.q, s.kv, config["intermediate_size"]
    assert count(Lora(rank=16), s) == 16 * s.layers * (2 * (hidden + q) + 2 * (hidden + kv) + 3 * (hidden + ffn))


@pytest.mark.parametrize(
    "change, options, message",
    [
        ({}, "lora.rank=5", "lora.rank: 5 is above the smallest dimension of an adapted matrix, 4 of k_proj"),
        ({}, "lora.targets=[query]", "lora.targets"),
        ({}, "lora.targets=[mlp,mlp]", "names a target twice"),
        ({}, "lora.targets=[mlp,vision]", "vision matches nothing, this model has no vision tower"),
        ({}, "lora.targets=[]", "lora.targets"),
        (
            {},
            "lora.targets=[q_proj,v_proj]",
            "q_proj, v_proj without k_proj, o_proj: megatron-core joins q_proj",
        ),
        ({}, "lora.targets=[attention,up_proj]", "Write mlp for gate_proj, up_proj, down_proj"),
        (LATENT, "lora.targets=[attention]", "attention matches nothing, the layers of this model have no"),
        (EXPERTS | {"moe_intermediate_size": 4, "num_experts_per_tok": 1}, "lora.rank=2", "adapters of experts"),
    ],
)
def test_what_a_model_cannot_have(path, change, options, message, capsys):  # noqa: F811
    (path.parent / "model/config.json").write_text(json.dumps(CONFIG | change))
    assert main.main(["plan", str(path), options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1, error


def test_the_plan_says_how_weights_go_to_the_engine(path, capsys):  # noqa: F811
    assert main.main(["plan", str(path), "lora.rank=2", "model.precision=fp32"]) == 0
    output = capsys.readouterr().out
    assert "sync: the model with its adapters merged, " in output and "rounding" not in output
    assert main.main(["plan", str(path), "lora.rank=2", "model.precision=bf16"]) == 0
    assert "; rounding to bf16 loses part of a small change" in capsys.readouterr().out


def test_names_of_peft_for_all_modules_of_a_target():
    modules = ["v_proj", "q_proj", "o_proj", "k_proj"]
    assert Lora(targets=modules) == Lora(targets=["attention"])
    assert Lora(targets=["mlp", *modules]) == Lora(targets=["mlp", "attention"])
