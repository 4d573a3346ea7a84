"""Mixtures in bf16. vLLM's groups of a process are those of its first engine, so a dense one must not live beside."""

import copy
from contextlib import closing

import pytest
import torch

from megatron_rft.inference import weight_sync
from megatron_rft.plan.vllm import unusable
from tests.families import FAMILIES
from tests.unit.inference.tiny import build_model, hf_stream

pytestmark = pytest.mark.skipif(unusable() is not None, reason=str(unusable()))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["glm4_moe", "glm4_moe_lite"])
def test_a_sync_to_a_bf16_engine_with_fp32_biases_and_latent_attention_is_compared(family):
    from megatron_rft.inference.vllm.engine import VLLMEngine

    config = copy.deepcopy(FAMILIES[family])
    vars(config).update(hidden_size=256, moe_intermediate_size=128, intermediate_size=256)
    with closing(VLLMEngine(config, torch.bfloat16, max_batch_sequences=4)) as engine:
        weight_sync.send(hf_stream(build_model(config)), engine, version=1, verify=True)
        assert torch.float32 in {tensor.dtype for tensor in engine._model().parameters()}
