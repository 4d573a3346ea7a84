"""What `megatron-rft convert` refuses before it reads a tensor."""

import pytest
from transformers import MistralConfig

from megatron_rft.commands.convert import convert
from megatron_rft.utils.errors import DataError
from tests.families import SIZES


def test_a_model_that_cannot_be_represented_is_refused_with_its_folder(tmp_path):
    MistralConfig(**SIZES, sliding_window=None, logits_scaling=8.0).save_pretrained(tmp_path / "model")
    with pytest.raises(DataError, match=f"{tmp_path}/model: .* logits_scaling: 8.0, which the code of mistral"):
        convert(str(tmp_path / "model"), tmp_path / "out")
    assert not (tmp_path / "out").exists()
