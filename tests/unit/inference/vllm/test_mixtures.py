"""Mixtures in bf16. vLLM's groups of a process are those of its first engine, so a dense one must not live beside."""

import copy
import json
from contextlib import closing

import pytest
import torch

from megatron_rft.inference import weight_sync
from megatron_rft.inference.vllm.arguments import save_config
from megatron_rft.plan.vllm import unusable
from megatron_rft.utils.device import cpu_words
from tests.families import FAMILIES
from tests.unit.inference.tiny import build_model, hf_stream

pytestmark = pytest.mark.skipif(unusable() is not None, reason=str(unusable()))


@pytest.mark.parametrize("family", ["glm4_moe", "glm4_moe_lite", "deepseek_v3", "moonlight", "minimax_m2"])
def test_a_configuration_of_transformers_gets_the_fields_of_published_ones(family, tmp_path):
    save_config(FAMILIES[family], tmp_path)
    found = json.loads((tmp_path / "config.json").read_text())
    assert (found["topk_method"], found["scoring_func"], found["use_routing_bias"]) == ("noaux_tc", "sigmoid", True)
    assert found.get("rotary_dim") == (8 if family == "minimax_m2" else None)  # half of a head


@pytest.mark.slow
@pytest.mark.parametrize("family", ["glm4_moe", "glm4_moe_lite", "deepseek_v3", "minimax_m2"])
def test_a_sync_to_a_bf16_engine_with_fp32_biases_and_latent_attention_is_compared(family):
    from megatron_rft.inference.vllm.engine import VLLMEngine

    config = copy.deepcopy(FAMILIES[family])
    vars(config).update(hidden_size=256, moe_intermediate_size=128, intermediate_size=128)
    if hasattr(config, "kv_lora_rank") and "amx_tile" in cpu_words():
        pytest.skip("vLLM 0.32 packs latent attention's matrices for AMX once, and takes no other weights then")
    with closing(VLLMEngine(config, torch.bfloat16, max_batch_sequences=4)) as engine:
        weight_sync.send(hf_stream(build_model(config)), engine, version=1, verify=True)
        assert torch.float32 in {tensor.dtype for tensor in engine._model().parameters()}
