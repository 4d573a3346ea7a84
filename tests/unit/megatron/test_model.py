"""Translation of a transformers configuration to megatron-core's, and refusals with their messages."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.module import Float16Module
from transformers import LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from megatron_rft.config.sections import Megatron
from megatron_rft.conversion import Mapping
from megatron_rft.megatron import model as models
from megatron_rft.megatron import parallel, weights
from megatron_rft.megatron.routers import Routers
from megatron_rft.utils.errors import ConfigError, DataError
from tests.families import FAMILIES
from tests.shapes import SMALL

MIXTURE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=6)


@pytest.fixture
def alone():
    parallel.initialize(Megatron())
    yield
    parallel.shutdown()


def test_a_configuration_in_megatrons_terms():
    config = models.transformer_config(Qwen3Config(**SMALL), Megatron(recompute_granularity="selective"), "bf16")
    assert (config.num_layers, config.kv_channels, config.num_query_groups, config.ffn_hidden_size) == (2, 8, 2, 24)
    assert config.qk_layernorm and not config.add_qkv_bias
    assert config.bf16 and config.params_dtype is torch.bfloat16
    assert config.calculate_per_token_loss and config.variable_seq_lengths
    assert config.recompute_granularity == "selective"


def test_biases_and_dense_layers_of_a_mixture():
    assert models.transformer_config(Qwen2Config(**SMALL), Megatron(), "fp32").add_qkv_bias
    mixture = Qwen3MoeConfig(**SMALL, **MIXTURE, mlp_only_layers=[0], norm_topk_prob=False)
    config = models.transformer_config(mixture, Megatron(), "fp32")
    assert config.moe_layer_freq == [0, 1] and config.moe_router_pre_softmax


def test_fields_of_megatron_core_pass_through():
    config = models.transformer_config(Qwen3Config(**SMALL), Megatron(disable_parameter_transpose_cache=True), "fp32")
    assert config.disable_parameter_transpose_cache


def test_the_bias_of_a_router_stays_exact_in_lower_precision(alone):
    (model,) = models.build(FAMILIES["glm4_moe"], Megatron(), "bf16")
    routers = Routers([Float16Module(model.config, model)]).routers
    assert {router.expert_bias.dtype for router in routers} == {torch.float32}
    assert {router.weight.dtype for router in routers} == {torch.bfloat16}


def test_fused_gradient_sums_need_no_apex_beside_transformer_engine(alone, monkeypatch):
    """Its layers are not here: those of torch would refuse too, and are built but not called."""
    config = models.transformer_config(Qwen3Config(**SMALL), Megatron(gradient_accumulation_fusion=True), "fp32")
    monkeypatch.setattr(models.layers, "_grad_accum_fusion_available", False)
    with pytest.raises(RuntimeError, match="APEX"):
        models._chunk(Qwen3Config(**SMALL), config, None, False)
    monkeypatch.setattr(models, "has_transformer_engine", lambda: True)
    model = models._chunk(Qwen3Config(**SMALL), config, None, False)
    assert type(model.output_layer) is models.OutputMatrix and models.layers._grad_accum_fusion_available


def test_virtual_stages_never_use_the_batched_exchange():
    layout = dict(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=1)
    config = models.transformer_config(Qwen3Config(**SMALL), Megatron(**layout), "fp32")
    assert config.overlap_p2p_comm and not config.batch_p2p_comm


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (Qwen3Config(**SMALL, hidden_act="gelu"), "hidden_act 'gelu'"),
        (Qwen3Config(**SMALL, attention_bias=True), "attention_bias: true"),
        (LlamaConfig(**SMALL, mlp_bias=True), "mlp_bias: true"),
        (Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=4, max_window_layers=0), "sliding-window"),
        (
            LlamaConfig(**SMALL, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            "rope_type 'dynamic'",
        ),
    ],
)
def test_an_architecture_that_cannot_be_represented_is_refused(config, words):
    with pytest.raises(DataError, match=words):
        models.transformer_config(config, Megatron(), "fp32")


@pytest.mark.parametrize(
    ("options", "precision", "words"),
    [
        (dict(sequence_parallel=True), "fp32", "megatron-core refuses"),
        (dict(tensor_model_parallel_size=3, sequence_parallel=True), "fp32", "megatron-core refuses"),
    ],
)
def test_options_that_cannot_work_are_refused(options, precision, words):
    with pytest.raises(ConfigError, match=words):
        models.transformer_config(Qwen3MoeConfig(**SMALL, **MIXTURE), Megatron(**options), precision)


def test_the_model_gives_hidden_states_and_its_output_matrix(alone):
    for tied in (True, False):
        hf_config = Qwen3Config(**SMALL, tie_word_embeddings=tied)
        (model,) = models.build(hf_config, Megatron(), "fp32")
        lookup = weights.random_tensors(hf_config, seed=0)
        weights.load([model], lookup, Mapping(hf_config))
        ids = torch.tensor([[1, 2, 3]])
        hidden = model(ids, torch.arange(3)[None], None)
        assert hidden.shape == (1, 3, 16)
        name = "model.embed_tokens.weight" if tied else "lm_head.weight"
        assert torch.equal(models.output_weight(model), lookup(name))


def test_llama3_frequencies_are_transformers_own(alone):
    """megatron-core's fixed 8192 would not scale a context length of 32."""
    rope = dict(rope_type="llama3", rope_theta=1e4, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
    scaled = LlamaConfig(**SMALL, rope_parameters=rope | {"original_max_position_embeddings": 32})
    (model,) = models.build(scaled, Megatron(), "fp32")
    plain = 1e4 ** (-torch.arange(0, 8, 2) / 8)
    # wavelengths 6.3, 63, 628, 6283: below 32 / 4 unchanged, above 32 / 1 divided by 8
    torch.testing.assert_close(model.rotary_pos_emb.inv_freq.cpu(), plain * torch.tensor([1, 0.125, 0.125, 0.125]))


def test_a_new_critic_values_everything_at_zero(alone):
    hf_config = Qwen3Config(**SMALL, tie_word_embeddings=True)
    (model,) = models.build(hf_config, Megatron(), "fp32", value_head=True)
    weights.load([model], weights.random_tensors(hf_config, seed=0), Mapping(hf_config))
    values = model(torch.tensor([[1, 2, 3]]), torch.arange(3)[None], None)
    assert values.tolist() == [[0.0, 0.0, 0.0]]
    values.sum().backward()
    assert model.output_layer.weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    "capability, recipe, tokens", [((8, 9), "tensorwise", 16), ((9, 0), "blockwise", 128), ((10, 0), "mxfp8", 32)]
)
def test_the_fp8_recipe_is_the_devices(monkeypatch, capability, recipe, tokens):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert models._precision(Megatron(), "fp8")["fp8_recipe"] == recipe
    assert models._precision(Megatron(fp8_recipe="mxfp8"), "fp8")["fp8_recipe"] == "mxfp8"
    assert models.token_multiple(SimpleNamespace(fp8="hybrid", fp8_recipe=recipe)) == tokens
    assert models.token_multiple(SimpleNamespace(fp8=None, fp8_recipe="delayed")) == 1
