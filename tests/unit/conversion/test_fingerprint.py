"""Fingerprints differ exactly for different models and tokenizers."""

import shutil

import pytest
import torch
from safetensors.torch import save_file

from megatron_rft.conversion.folder import copy_companions, model_fingerprint, tokenizer_fingerprint


def model(folder, change=None, elements=3_000_000):
    """12 MB of weights, of which a fingerprint reads a third; `change` moves every value, as training does."""
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_size": 8}')
    weight = torch.arange(elements, dtype=torch.float32)
    save_file({"w": weight if change is None else weight * (1 + change)}, folder / "model.safetensors")
    return folder


def test_models(tmp_path):
    first = model(tmp_path / "a")
    shutil.copytree(first, tmp_path / "copy")
    assert model_fingerprint(first) == model_fingerprint(tmp_path / "copy")
    others = [model(tmp_path / "b", change=1e-5), model(tmp_path / "c", elements=3_000_001)]
    (tmp_path / "copy" / "config.json").write_text('{"hidden_size": 9}')
    assert len({model_fingerprint(folder) for folder in (first, *others, tmp_path / "copy")}) == 4


@pytest.mark.parametrize("file", ["tokenizer.json", "spiece.model", "vocab.txt", "qwen.tiktoken", "tekken.json"])
def test_tokenizers(file, tmp_path):
    for name, text in (("a", '{"x": 1}'), ("b", '{"x": 2}'), ("c", '{"x": 1}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(text)
        (tmp_path / name / "config.json").write_text(name)  # the model's, not the tokenizer's
    found = [tokenizer_fingerprint(tmp_path / name) for name in "abc"]
    assert found[0] == found[2] != found[1]
    copy_companions(tmp_path / "b", tmp_path / "a")  # an export takes it along
    assert tokenizer_fingerprint(tmp_path / "a") == found[1]
