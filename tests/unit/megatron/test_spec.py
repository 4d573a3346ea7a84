"""Which attention a layer gets."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.enums import AttnBackend

from megatron_rft.megatron import spec


@pytest.mark.parametrize(
    "capability, dtype, flash_attn, expected",
    [
        ((9, 0), torch.bfloat16, False, True),
        ((10, 0), torch.bfloat16, False, True),
        ((9, 0), torch.float32, True, False),
        ((8, 0), torch.bfloat16, False, False),
        ((8, 9), torch.bfloat16, True, True),
    ],
)
def test_where_transformer_engine_has_a_fused_kernel(monkeypatch, capability, dtype, flash_attn, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "flash_attn" and flash_attn or None)
    config = SimpleNamespace(params_dtype=dtype, attention_backend=AttnBackend.auto)
    assert spec.uses_fused_attention(config) is expected
    config.attention_backend = AttnBackend.unfused
    assert spec.uses_fused_attention(config), "the recipe names a kernel of Transformer Engine"
