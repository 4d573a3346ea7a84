"""Conversion in both directions: equal bits, the tokenizer is copied, and a failure leaves no files."""

import io
import json
import os
import pickle
import shutil
import subprocess
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from megatron_rft.conversion import FolderWriter, HFFolder, hf_shapes
from megatron_rft.conversion import convert as conversion
from megatron_rft.conversion.convert import SourceCheckpoint, convert
from megatron_rft.conversion.torch_dist import MegatronFolder, Unpickler
from megatron_rft.plan.vllm import unusable
from megatron_rft.utils.errors import DataError, RunFailed
from tests import families
from tests.shapes import SMALL

WITHOUT_HEAD_DIM = {name: size for name, size in SMALL.items() if name != "head_dim"}
FAMILIES = {
    "llama": LlamaConfig(**SMALL),
    "qwen2": Qwen2Config(**WITHOUT_HEAD_DIM, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SMALL),
    "qwen3_moe": Qwen3MoeConfig(
        **SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, mlp_only_layers=[0]
    ),
    **families.FAMILIES,
    **families.SEEING,
}


def write(path, hf_config, dtype=torch.bfloat16):
    """An HF folder with a different number in every cell, a tokenizer and a chat template."""
    writer, first = FolderWriter(path), 0
    for name, shape in hf_shapes(hf_config).items():
        count = torch.Size(shape).numel()
        writer.add(name, torch.arange(first, first + count).view(shape).sin().to(dtype))
        first += count
    writer.finish(hf_config, None)
    for name in ("tokenizer.json", "generation_config.json", "preprocessor_config.json", "processor_config.json"):
        (path / name).write_text("{}")
    (path / "chat_template.jinja").write_text("{{ messages }}")
    return SourceCheckpoint(path, "hf", hf_config, path)


@pytest.fixture
def source(tmp_path):
    return write(tmp_path / "hf", FAMILIES["qwen3"])


@pytest.fixture
def megatron(source, tmp_path):
    """The same as a torch_dist checkpoint."""
    convert(source, tmp_path / "megatron", "megatron")
    return SourceCheckpoint(tmp_path / "megatron", "megatron", source.hf_config, source.path)


def files(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back(tmp_path, family):
    hf_config = FAMILIES[family]
    source = write(tmp_path / "hf", hf_config)
    there = convert(source, tmp_path / "megatron", "megatron", file_bytes=2000)
    assert len(list((tmp_path / "megatron").glob("*.distcp"))) > 1
    middle = SourceCheckpoint(tmp_path / "megatron", "megatron", hf_config, tmp_path / "megatron")
    again = convert(middle, tmp_path / "recut", "megatron")
    back = convert(SourceCheckpoint(tmp_path / "recut", "megatron", hf_config, source.path), tmp_path / "back", "hf")
    assert there.digest == again.digest == back.digest and back.tensors == len(hf_shapes(hf_config))
    before, after = HFFolder(source.path, hf_config), HFFolder(tmp_path / "back", hf_config)
    assert all(torch.equal(before(name), after(name)) for name in hf_shapes(hf_config))
    assert {after(name).dtype for name in hf_shapes(hf_config)} == {torch.bfloat16}
    kind = families.transformers_class(hf_config)
    expected, found = (kind.from_pretrained(p).eval() for p in (source.path, tmp_path / "back"))
    ids = torch.arange(8)[None]
    assert torch.equal(expected(ids).logits, found(ids).logits)


def test_what_belongs_to_the_model_comes_along(source, megatron):
    companions = ("tokenizer.json", "chat_template.jinja", "generation_config.json", "config.json")
    for name in (*companions, "preprocessor_config.json", "processor_config.json"):
        assert (megatron.path / name).is_file()
    report = json.loads((megatron.path / "conversion.json").read_text())
    assert report["source"] == str(source.path) and report["tensors"] == len(hf_shapes(source.hf_config))


def test_vllm_loads_it_and_gives_the_same_log_probs(tmp_path):
    if (reason := unusable()) is not None:
        pytest.skip(str(reason))
    known_to_vllm = Qwen3Config(**SMALL | {"head_dim": 32})  # its CPU build has no attention for smaller heads
    source = write(tmp_path / "hf", known_to_vllm, torch.float32)
    convert(source, tmp_path / "megatron", "megatron")
    convert(SourceCheckpoint(tmp_path / "megatron", "megatron", source.hf_config, source.path), tmp_path / "back", "hf")
    from megatron_rft.inference.engine import Request, Sampling
    from megatron_rft.inference.vllm.engine import VLLMEngine

    folder = HFFolder(tmp_path / "back", known_to_vllm)
    with closing(VLLMEngine(known_to_vllm)) as engine:
        engine.load_weights(((name, folder(name)) for name in hf_shapes(known_to_vllm)), 1)
        (group,) = engine.generate([Request(0, tuple(range(8)), 1, seed=0)], Sampling(4, temperature=0.0))
    (response,) = group.responses
    model = AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.float32).eval()
    logits = model(torch.tensor([[*range(8), *response.token_ids]])).logits[0, 7:-1]  # [R, V]
    expected = logits.log_softmax(-1)[torch.arange(4), torch.tensor(response.token_ids)]
    assert list(response.logprobs) == pytest.approx(expected.tolist(), abs=1e-4)


# ---- what is refused


def opened(folder, hf_config) -> str:
    with pytest.raises(DataError) as error:
        MegatronFolder(folder, hf_config)
    return str(error.value)


def test_a_checkpoint_of_another_architecture(megatron):
    text = opened(megatron.path, FAMILIES["qwen2"])
    assert "missing: decoder.layers.0.self_attention.linear_qkv.bias" in text
    assert "unexpected: decoder.layers.self_attention.q_layernorm.weight" in text
    assert "of another shape" in text and "config.json says" in text
    deeper = Qwen3Config(**SMALL | {"num_hidden_layers": 3})
    assert "(2, 16), config.json says (3, 16)" in opened(megatron.path, deeper)


@pytest.mark.parametrize("damage", ["no file", "cut off", "no metadata", "no checkpoint"])
def test_a_checkpoint_that_is_not_whole(megatron, tmp_path, damage):
    file, expected = megatron.path / "__0_0.distcp", "the file __0_0.distcp is "
    if damage == "no file":
        file.unlink()
        expected += "not there"
    elif damage == "cut off":
        os.truncate(file, file.stat().st_size // 2)
        expected += "cut off"
    elif damage == "no metadata":
        (megatron.path / ".metadata").unlink()
        expected = "is incomplete: it has no .metadata"
    else:
        shutil.rmtree(megatron.path)
        expected = "is no checkpoint"
    with pytest.raises(DataError, match=expected):
        convert(megatron, tmp_path / "out", "hf")
    assert not (tmp_path / "out").exists()


def test_a_file_that_would_run_code(megatron):
    class Evil:
        def __reduce__(self):
            return os.system, ("touch " + str(megatron.path / "ran"),)

    (megatron.path / ".metadata").write_bytes(pickle.dumps(Evil()))
    assert "posix.system, which no checkpoint needs" in opened(megatron.path, megatron.hf_config)
    assert not (megatron.path / "ran").exists()


class Attribute:
    """Pickled like a member of an enumeration by Python up to 3.11.3."""

    def __init__(self, *of_what):
        self.of_what = of_what

    def __reduce__(self):
        return getattr, self.of_what


def test_members_of_enumerations_as_older_pythons_write_them():
    def read(*of_what):
        return Unpickler(io.BytesIO(pickle.dumps(Attribute(*of_what)))).load()

    assert read(_MEM_FORMAT_ENCODING, "TORCH_PRESERVE_FORMAT") is _MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT
    for of_what in ((_MEM_FORMAT_ENCODING, "__class__"), (Metadata, "__init__"), (torch.Size, "numel")):
        with pytest.raises(DataError, match="which no checkpoint needs"):
            read(*of_what)


def test_a_safetensors_file_that_is_cut_off(source, tmp_path):
    file = source.path / "model.safetensors"
    os.truncate(file, file.stat().st_size - 100)
    with pytest.raises(DataError, match=r"model\.safetensors is damaged or incomplete"):
        convert(source, tmp_path / "out", "megatron")


def test_an_output_that_is_there_already(source, megatron):
    with pytest.raises(DataError, match="exists already"):
        convert(source, megatron.path, "megatron")


def test_bits_that_do_not_come_back(source, tmp_path, monkeypatch):
    read = MegatronFolder.__call__
    monkeypatch.setattr(MegatronFolder, "__call__", lambda self, name: read(self, name) * (name != "model.norm.weight"))
    with pytest.raises(RunFailed, match="1 of 25 tensors do not read back as they were written"):
        convert(source, tmp_path / "out", "megatron")
    assert files(tmp_path) == ["hf"]


@pytest.mark.parametrize("to", ["hf", "megatron"])
def test_a_source_that_is_removed_meanwhile(source, tmp_path, monkeypatch, to):
    """A run that goes on removes old checkpoints."""
    if to == "hf":
        convert(source, tmp_path / "mcore", "megatron")
        source = replace(source, path=tmp_path / "mcore", format="megatron")
    monkeypatch.setattr(conversion, "_check_space", lambda *_: shutil.rmtree(source.path))
    gone = rf"the source .* can no longer be read: .*No such file or directory: .*{source.path}/"
    with pytest.raises(DataError, match=gone):
        convert(source, tmp_path / "out", to)


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied", "/"), OSError(5, "Input/output error")])
def test_an_output_that_cannot_be_written(tmp_path, error):
    (tmp_path / "file").write_text("")
    told = f"^{tmp_path}/file/out cannot be written: .*{tmp_path}/file"
    with pytest.raises(DataError, match=told), conversion.atomic_folder(tmp_path / "file/out") as partial:
        partial.mkdir(parents=True)
    told = f"^{tmp_path}/out cannot be written: "
    with pytest.raises(DataError, match=told), conversion.atomic_folder(tmp_path / "out"):
        raise error


@pytest.mark.parametrize("to", ["hf", "megatron"])
def test_a_disk_that_is_full(source, tmp_path, monkeypatch, to):
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", small], capture_output=True).returncode:
        pytest.skip("a file system of its own can be mounted by root only")
    try:
        with pytest.raises(DataError, match="GiB are needed"):
            convert(source, small / "out", to)
        monkeypatch.setattr(conversion, "_check_space", lambda *_: None)  # the disk fills up meanwhile
        with pytest.raises(DataError, match="disk is full; nothing was left there"):
            convert(source, small / "out", to)
        assert files(small) == []
    finally:
        subprocess.run(["umount", "-l", small], check=True)
