"""FP8 weights: the engine computes with the rounded weights, or the sync names the tensor. On the CPU build, with the
only FP8 kernel that it has everywhere."""

import pytest
import torch
from transformers import Qwen2Config

from megatron_rft.inference import weight_sync
from megatron_rft.inference.engine import Request, Sampling
from megatron_rft.inference.weight_sync import compare
from megatron_rft.plan.vllm import unusable
from megatron_rft.utils.errors import RunFailed
from tests.unit.inference.tiny import SHAPE, build_model, hf_stream

pytestmark = pytest.mark.skipif(unusable() is not None, reason=str(unusable()))

# Biases, a fused matrix of three and one of two; heads that the CPU build has a kernel for.
CONFIG = Qwen2Config(**SHAPE | dict(vocab_size=100, hidden_size=128), tie_word_embeddings=True)
KEY, DOWN = "model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def models():
    return [build_model(CONFIG, seed, scale=1.0) for seed in (0, 1)]


@pytest.fixture(scope="module")
def engine():
    from megatron_rft.inference.vllm.engine import VLLMEngine

    options = {"quantization": "fp8_per_channel"}
    if torch.cpu._is_avx512_supported():  # else vLLM has no FP8 cache on CPUs
        options["kv_cache_dtype"] = "fp8"
    engine = VLLMEngine(CONFIG, torch.bfloat16, max_batch_sequences=8, options=options)
    yield engine
    engine.close()


def test_close_to_the_exact_model_after_every_sync(engine, models):
    request = Request(0, tuple(range(3, 40)), 4, seed=1)
    for version, model in enumerate([*models, models[0]]):
        weight_sync.send(hf_stream(model), engine, version, verify=True)
        found = engine.checksums()
        assert found[DOWN] is found[KEY] is None and found["model.norm.weight"] is not None
        (group,) = engine.generate([request], Sampling(12))
        for response in group.responses:
            ids = torch.tensor([request.prompt_ids + response.token_ids])
            exact = model(ids[:, :-1]).logits[0].log_softmax(-1).gather(1, ids[0, 1:, None])[-12:, 0]
            difference = (exact - torch.tensor(response.logprobs)).abs()
            assert 0 < difference.mean() < 0.05 and response.weight_version == version


def test_a_change_after_the_comparison_is_found(engine, models):
    weight_sync.send(hf_stream(models[0]), engine, 1)
    engine._model().model.layers[0].mlp.down_proj.weight_scale.data[3] *= 1.01
    held = engine.checksums()
    with pytest.raises(RunFailed, match=f"version 1: {DOWN} in the engine is not what the actor sent"):
        compare(dict.fromkeys([DOWN, KEY], 0), {name: held[name] for name in (DOWN, KEY)}, 1)


def test_exchanged_tensors_are_found(engine, models, monkeypatch):
    """vLLM's loading exchanges them, all at its end."""
    network, other = engine._model(), KEY.replace("1", "0")
    load, names = network.load_weights, {KEY: other, other: KEY}
    monkeypatch.setattr(network, "load_weights", lambda stream: load((names.get(n, n), t) for n, t in list(stream)))
    with pytest.raises(RunFailed, match=rf"version 2: {other} in the engine is not what .* rounded to FP8: .* became"):
        engine.load_weights(hf_stream(models[0]), 2)


def test_a_scale_that_is_off_by_little(engine, models, monkeypatch):
    """Every element is still close to its value."""
    from vllm.model_executor.layers.quantization.online import fp8

    quantise = fp8._fp8_quant_per_channel
    monkeypatch.setattr(fp8, "_fp8_quant_per_channel", lambda weight, scale: quantise(weight, scale * 1.03))
    with pytest.raises(RunFailed, match="version 3: .*weight in the engine is not what the actor sent, rounded to FP8"):
        engine.load_weights(hf_stream(models[0]), 3)
    monkeypatch.undo()
    weight_sync.send(hf_stream(models[0]), engine, 4, verify=True)


def test_a_layer_that_was_not_read_back(engine, models, monkeypatch):
    from megatron_rft.inference.vllm.fp8 import Comparison

    monkeypatch.setattr(Comparison, "_compare", lambda *_: None)
    with pytest.raises(RunFailed, match=r"was not read back out of the engine \(20 tensors were not\)"):
        engine.load_weights(hf_stream(models[0]), 5)


@pytest.mark.parametrize("group", [(1, 256), (300, 256), (128, 128)])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_the_bound_holds_for_every_rounding_and_for_no_step_more(group, power_of_two):
    from megatron_rft.inference.vllm.fp8 import beyond

    weight = torch.randn(300, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 0, 300)[:, None]
    padded = torch.nn.functional.pad(weight, (0, -256 % group[1], 0, -300 % group[0]))
    blocks = padded.unflatten(1, (-1, group[1])).unflatten(0, (-1, group[0])).abs().amax((1, 3), keepdim=True)
    scale = (blocks / 448).clamp_min(1 / (448 * 512))
    scale = torch.exp2(scale.log2().ceil()) if power_of_two else scale
    scale = scale.expand(-1, group[0], -1, group[1]).flatten(2, 3).flatten(0, 1)[:300, :256]
    rounded = (weight.bfloat16() / scale).to(torch.float8_e4m3fn)
    held = (rounded.float() * scale).bfloat16()
    largest = weight.abs().max().item()
    assert beyond(weight, held, largest) is None
    row, column = divmod(int(weight.abs().argmax()), 256)
    held[row, column] *= 1.125
    assert "(the first of 1 such elements)" in beyond(weight, held, largest)
