"""Folders of adapters in PEFT's format that mean something else than a recipe's section."""

import json

import pytest
import torch
from transformers import Qwen3Config

from megatron_rft.config.lora import Lora
from megatron_rft.conversion import lora
from megatron_rft.utils.errors import DataError
from tests.shapes import SMALL


@pytest.fixture
def read(tmp_path):
    """Reads adapters whose configuration has further fields."""
    config, options = Qwen3Config(**SMALL), Lora(rank=2)
    given = {name: torch.randn(shape) for name, shape in lora.shapes(config, options).items()}
    lora.write(tmp_path, given.items(), options, config, "base", "print")
    written = json.loads((tmp_path / lora.CONFIG).read_text())

    def read(**more):
        (tmp_path / lora.CONFIG).write_text(json.dumps(written | more))
        lora.read(tmp_path, options, config, "print")

    return read


def test_factors_of_single_modules_are_refused(read):
    """PEFT multiplies a module in alpha_pattern by a factor of its own, which no tensor shows."""
    read()
    with pytest.raises(DataError, match=r"has alpha_pattern {'q_proj': 64}, and this recipe's `lora` means {}"):
        read(alpha_pattern={"q_proj": 64})
    read(alpha_pattern={})


def test_adapters_of_a_changed_model_are_refused(read):
    """PiSSA subtracts the initial adapters from the model's own weights, which its folder does not have."""
    for plain in (True, False, None, "gaussian", "eva", "orthogonal"):
        read(init_lora_weights=plain)
    for changing in ("pissa", "pissa_niter_16", "olora", "corda", "loftq"):
        with pytest.raises(DataError, match=f"has init_lora_weights {changing}, which changed the model's own weights"):
            read(init_lora_weights=changing)
