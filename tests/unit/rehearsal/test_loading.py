"""Model folders of a rehearsal: names, shapes and dtypes of files that may be absent, and tensors without values."""

import json

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from transformers import Qwen3Config

from megatron_rft.conversion import FolderWriter, hf_shapes
from megatron_rft.plan.devices import Efficiency, device
from megatron_rft.rehearsal.device import FakeDevice
from megatron_rft.rehearsal.ledger import Ledger
from megatron_rft.rehearsal.loading import ModelFolder
from megatron_rft.utils.errors import DataError
from tests.shapes import SMALL

CONFIG = Qwen3Config(**SMALL, tie_word_embeddings=True)
INDEX = "model.safetensors.index.json"
NORM = "model.norm.weight"


@pytest.fixture
def mode():
    return FakeDevice(Ledger(device("h100"), Efficiency()))


def write(path, shard_bytes=1 << 30):
    writer = FolderWriter(path, shard_bytes)
    for name, shape in hf_shapes(CONFIG).items():
        writer.add(name, torch.ones(shape, dtype=torch.float16))
    writer.finish(CONFIG, None)


def write_index(path, more=(), without=()):
    names = {*hf_shapes(CONFIG), *more} - {*without}
    (path / INDEX).write_text(json.dumps({"weight_map": {name: f"{len(name) % 2}.safetensors" for name in names}}))


def test_files_tell_shapes_and_dtypes_and_no_value_is_read(tmp_path, mode):
    write(tmp_path / "model", shard_bytes=1000)
    folder = ModelFolder(tmp_path / "model", CONFIG, mode)
    for name, shape in hf_shapes(CONFIG).items():
        found = folder(name)
        assert isinstance(found, FakeTensor) and tuple(found.shape) == shape and found.dtype == torch.float16
    del found
    with mode.ledger.during("loading"):
        kept = folder(NORM)
    assert mode.ledger.host.peaks["loading"][0] == 512  # the block of the one that is kept
    del kept
    assert mode.ledger.host.total == 0


def test_one_absent_file_of_several_is_missed_as_by_a_run(tmp_path, mode):
    write(tmp_path / "model", shard_bytes=1000)
    next((tmp_path / "model").glob("*.safetensors")).unlink()
    with pytest.raises(DataError, match="names files that are not there"):
        ModelFolder(tmp_path / "model", CONFIG, mode)


def test_an_index_alone_names_the_tensors(tmp_path, mode):
    write_index(tmp_path, more=["lm_head.weight"])  # a tied matrix that a file may have as well
    assert ModelFolder(tmp_path, CONFIG, mode)(NORM).dtype == torch.bfloat16


def test_an_index_of_another_model_is_refused_in_the_words_of_a_run(tmp_path, mode):
    write_index(tmp_path, more=["model.layers.0.self_attn.sinks"], without=[NORM])
    with pytest.raises(DataError) as error:
        ModelFolder(tmp_path, CONFIG, mode)
    assert f"{tmp_path}: the tensors are not those of this qwen3 model" in str(error.value)
    assert "1 missing: model.norm.weight; 1 unexpected: model.layers.0.self_attn.sinks" in str(error.value)


def test_without_any_file_the_tensors_are_those_of_the_family(tmp_path, mode):
    folder = ModelFolder(tmp_path / "nowhere", CONFIG, mode)
    assert set(folder.files) == set(hf_shapes(CONFIG))
    with pytest.raises(KeyError):
        folder("lm_head.weight")


def test_pickled_weights_are_refused_as_by_a_run(tmp_path, mode):
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(DataError, match="pickled weights"):
        ModelFolder(tmp_path, CONFIG, mode)
