"""Folders of adapters in PEFT's format that mean something else than a recipe's section."""

import json

import pytest
import torch
from transformers import Qwen3Config

from megatron_rft.config.lora import Lora
from megatron_rft.conversion import lora
from megatron_rft.utils.errors import DataError
from tests.shapes import SMALL


def test_factors_of_single_modules_are_refused(tmp_path):
    """PEFT multiplies a module in alpha_pattern by a factor of its own, which no tensor shows."""
    config, options = Qwen3Config(**SMALL), Lora(rank=2)
    given = {name: torch.randn(shape) for name, shape in lora.shapes(config, options).items()}
    lora.write(tmp_path, given.items(), options, config, "base", "print")
    lora.read(tmp_path, options, config, "print")
    written = json.loads((tmp_path / lora.CONFIG).read_text())
    (tmp_path / lora.CONFIG).write_text(json.dumps(written | {"alpha_pattern": {"q_proj": 64}}))
    with pytest.raises(DataError, match=r"has alpha_pattern {'q_proj': 64}, and this recipe's `lora` means {}"):
        lora.read(tmp_path, options, config, "print")
    (tmp_path / lora.CONFIG).write_text(json.dumps(written | {"alpha_pattern": {}}))
    lora.read(tmp_path, options, config, "print")
