"""Reading and writing HF folders: those of transformers, and the errors for damaged ones."""

import itertools
import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config

from megatron_rft.conversion import FolderWriter, HFFolder, hf_shapes, load_config
from megatron_rft.conversion.folder import keep_one
from megatron_rft.families.tables import family_of
from megatron_rft.utils.errors import DataError
from tests.families import SEEING
from tests.shapes import SMALL

CONFIG = Qwen3Config(**SMALL, tie_word_embeddings=True)


def write(path, **options):
    writer = FolderWriter(path, **options)
    for i, (name, shape) in enumerate(hf_shapes(CONFIG).items()):
        writer.add(name, torch.full(shape, float(i)))
    writer.finish(CONFIG, None)


@pytest.mark.parametrize("shard_bytes", [1 << 30, 1000], ids=["one file", "several"])
def test_transformers_reads_what_is_written(tmp_path, shard_bytes):
    write(tmp_path / "out", shard_bytes=shard_bytes)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    folder = HFFolder(tmp_path / "out", CONFIG)
    assert torch.equal(model.model.norm.weight, folder("model.norm.weight"))
    assert (tmp_path / "out" / "model.safetensors").exists() == (shard_bytes == 1 << 30)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_folder_is_replaced_only_when_complete(tmp_path):
    write(tmp_path / "out")
    writer = FolderWriter(tmp_path / "out")
    writer.add("model.norm.weight", torch.zeros(16))  # and then the process dies
    assert HFFolder(tmp_path / "out", CONFIG)("model.norm.weight").mean() > 0
    write(tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("calls", [1, 2, 3])
def test_a_kill_while_a_folder_is_replaced_leaves_a_whole_one(tmp_path, monkeypatch, calls):
    """Before each of the renames: of the old folder, of the new one, of the old one again to remove it."""
    write(tmp_path / "out")
    rename, count = os.rename, itertools.count(1)

    def killed(old, new):
        if new.suffix != ".safetensors" and next(count) == calls:
            raise KeyboardInterrupt
        rename(old, new)

    monkeypatch.setattr("megatron_rft.conversion.folder.os.rename", killed)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "out")
    keep_one(tmp_path / "out")
    assert HFFolder(tmp_path / "out", CONFIG)("model.norm.weight").mean() > 0
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_the_tokenizer_and_generation_files_come_along(tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "tokenizer.json").write_text("{}")
    (tmp_path / "source" / "notes.md").write_text("not ours")
    writer = FolderWriter(tmp_path / "out")
    writer.add("model.norm.weight", torch.zeros(16, dtype=torch.bfloat16))
    writer.finish(CONFIG, tmp_path / "source")
    assert (tmp_path / "out" / "tokenizer.json").exists() and not (tmp_path / "out" / "notes.md").exists()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"] and config["dtype"] == "bfloat16"


def test_what_is_wrong_with_the_tensors_is_named(tmp_path):
    write(tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.self_attn.q_norm.weight"]
    tensors["model.norm.weight"] = torch.zeros(9)
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(16)
    tensors["model.rotary_emb.inv_freq"] = torch.zeros(1)
    tensors["lm_head.weight"] = torch.zeros(11, 16)
    save_file(tensors, file)
    with pytest.raises(DataError) as error:
        HFFolder(tmp_path / "out", CONFIG)
    text = str(error.value)
    assert "1 missing: model.layers.1.self_attn.q_norm.weight" in text
    assert "1 unexpected: model.layers.0.self_attn.q_proj.bias" in text
    assert "model.norm.weight (9,), config.json says (16,)" in text
    assert "names the architecture" not in text
    other = Qwen3Config(**CONFIG.to_dict() | {"architectures": ["Phi3ForCausalLM"]})
    with pytest.raises(DataError, match="; its configuration names the architecture Phi3ForCausalLM"):
        HFFolder(tmp_path / "out", other)


def test_no_folder_no_weights_and_pickles(tmp_path):
    with pytest.raises(DataError, match="no such folder"):
        HFFolder(tmp_path / "absent", CONFIG)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(DataError, match="not read: save the model with"):
        HFFolder(tmp_path, CONFIG)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(DataError, match="names files that are not there: gone.safetensors"):
        HFFolder(tmp_path, CONFIG)


@pytest.mark.parametrize(
    "wrong, why",
    [
        ({"num_hidden_layers": 3}, r"`num_hidden_layers` \(3\) must be equal to the number of `layer_types` \(2\)"),
        ({"hidden_size": "wide"}, "Field 'hidden_size' expected int, got str"),
        (
            {"model_type": "none such", "architectures": ["Qwen3ForCausalLM"]},
            "model_type 'none such' is not supported .* has the layers of qwen3, whose",
        ),
        # transformers would ask whether to run code that is in the folder
        ({"model_type": "mine", "auto_map": {"AutoConfig": "code.Mine"}}, "model_type 'mine' is not supported"),
    ],
)
def test_a_configuration_that_cannot_be(tmp_path, wrong, why):
    CONFIG.save_pretrained(tmp_path)
    (tmp_path / "code.py").write_text("raise SystemExit")
    assert load_config(tmp_path).num_hidden_layers == 2
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | wrong))
    with pytest.raises(DataError, match=f"no model configuration can be loaded from {tmp_path}: .*{why}"):
        load_config(tmp_path)


@pytest.mark.parametrize("family", SEEING)
@pytest.mark.parametrize("own", [("model.", "visual."), ("model.language_model.", "model.visual.")])
def test_a_model_that_sees_is_read_under_the_names_of_any_version(tmp_path, family, own):
    config = SEEING[family]
    writer, (text, tower), table = FolderWriter(tmp_path / "out"), own, family_of(config)
    for name, shape in hf_shapes(config).items():
        stored = name.replace(table.tower, tower) if "visual." in name else name.replace(table.prefix, text)
        writer.add(stored, torch.full(shape, float(len(name))))
    writer.finish(config, None)
    folder = HFFolder(tmp_path / "out", load_config(tmp_path / "out"))
    assert all((folder(name) == len(name)).all() for name in hf_shapes(config)) and not folder.skipped
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == family


@pytest.mark.parametrize(
    "prefix, beside",
    [
        ("model.language_model.", ("model.visual.patch_embed.weight", "mtp.fc.weight")),
        ("language_model.model.", ("vision_tower.x.weight", "multi_modal_projector.x")),
    ],
)
def test_other_parts_of_a_published_model_are_left_out_by_name(tmp_path, capsys, prefix, beside):
    """A text model inside one that sees, with layers that predict further tokens; any other tensor is refused."""
    write(tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    text = {name.replace("model.", prefix, 1): tensor for name, tensor in load_file(file).items()}
    beside += (f"{prefix}layers.2.mlp.up_proj.weight",)
    save_file(text | {name: torch.ones(2) for name in beside}, file)
    folder = HFFolder(tmp_path / "out", CONFIG)
    assert folder("model.norm.weight").shape == (16,) and len(folder.skipped) == 3
    assert "3 tensors of other parts of the model are left out: model.layers.2.mlp" in capsys.readouterr().out
    save_file(text | {"model.language_model.extra.weight": torch.ones(2)}, file)
    with pytest.raises(DataError, match="1 unexpected: model.extra.weight"):
        HFFolder(tmp_path / "out", CONFIG)
