"""A vLLM engine that keeps the model and gets adapters: it must answer as the merged model."""

import pytest
import torch
from transformers import Qwen3Config

from megatron_rft.config.lora import Lora
from megatron_rft.conversion import lora
from megatron_rft.inference import weight_sync
from megatron_rft.inference.engine import Request, Sampling
from megatron_rft.plan.vllm import unusable
from megatron_rft.utils.errors import RunFailed
from tests.unit.inference.tiny import SHAPE, build_model, hf_stream

pytestmark = pytest.mark.skipif(unusable() is not None, reason=str(unusable()))

OPTIONS = Lora(rank=3, alpha=6.0, sync="adapters")
CONFIG = Qwen3Config(**SHAPE | dict(vocab_size=100), head_dim=32, tie_word_embeddings=True)


def adapters(seed: int, options: Lora = OPTIONS) -> dict[str, torch.Tensor]:
    """A, and s B, by HF name."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in lora.shapes(CONFIG, options).items()}


@pytest.fixture(scope="module")
def model():
    return build_model(CONFIG, 0)


def merged(model, tensors):
    """The same architecture with the merged weights."""
    found, unscaled = build_model(CONFIG, 0), OPTIONS.model_copy(update={"alpha": float(OPTIONS.rank)})
    whole = lora.Merged(dict(hf_stream(model)).__getitem__, tensors.__getitem__, unscaled)
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            parameter.copy_(whole(name))
    return found


@pytest.fixture(scope="module")
def engine():
    from megatron_rft.inference.vllm.engine import VLLMEngine

    engine = VLLMEngine(CONFIG, max_batch_sequences=8, lora=OPTIONS)
    yield engine
    engine.close()


def check(engine, model, tensors):
    """Greedy tokens, and their log-probs, are those of the merged model."""
    requests = [Request(i, tuple(range(3 + i, 3 + 3 * i + 4)), 1, seed=0) for i in range(3)]
    expected = merged(model, tensors)
    for group in engine.generate(requests, Sampling(8, temperature=0)):
        (response,) = group.responses
        ids = torch.tensor([[*requests[group.id].prompt_ids, *response.token_ids]])
        with torch.no_grad():
            logits = expected(ids).logits[0, -9:-1].log_softmax(-1)
        assert torch.equal(logits.argmax(-1), ids[0, -8:])
        assert (logits.max(-1).values - torch.tensor(response.logprobs)).abs().max() < 1e-4


def test_it_answers_as_the_merged_model_and_later_gets_the_adapters_alone(engine, model):
    first, second, kept = adapters(1), adapters(2), {}
    whole = weight_sync.send((dict(hf_stream(model)) | first).items(), engine, 1, verify=True, kept=kept)
    check(engine, model, first)
    alone = weight_sync.send(second.items(), engine, 2, verify=True, kept=kept)
    check(engine, model, second)
    assert alone["sync/bytes"] == 4 * sum(tensor.numel() for tensor in second.values()) < whole["sync/bytes"]
    assert len(kept) == whole["sync/tensors"] == len(engine.checksums())
    kept["model.norm.weight"] += 1  # the engine's is compared too
    with pytest.raises(RunFailed, match="model.norm.weight in the engine is not what the actor sent"):
        weight_sync.send(second.items(), engine, 3, verify=True, kept=kept)
    weight_sync.send((dict(hf_stream(model)) | first).items(), engine, 4)  # a replaced engine's neighbours get it again
    check(engine, model, first)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda name, tensor: [], r"lora_[AB].weight is missing \(1 of \d+ tensors"),
        (lambda name, tensor: [(name, tensor[:, :-1])], r"lora_[AB].weight has shape"),
        (lambda name, tensor: [(name, tensor * torch.nan)], "non-finite"),
    ],
)
def test_faulty_adapters_are_refused(engine, model, change, message):
    weight_sync.send((dict(hf_stream(model)) | adapters(1)).items(), engine, 1)
    *others, last = adapters(2).items()
    with pytest.raises(RunFailed, match=message):
        engine.load_weights(iter([*others, *change(*last)]), 2)
    with pytest.raises(RunFailed, match="before any weights"):
        list(engine.generate([Request(0, (3,), 1, seed=0)], Sampling(3)))


def test_an_adapter_that_is_bound_to_no_layer_is_an_error(engine, model, monkeypatch):
    from vllm.lora.layers import BaseLayerWithLoRA

    monkeypatch.setattr(BaseLayerWithLoRA, "set_lora", None)
    for kind in all_kinds(BaseLayerWithLoRA):
        monkeypatch.setattr(kind, "set_lora", lambda *_: None)
    with pytest.raises(RunFailed, match=r"is not what was sent, in the engine \(28 of 28 tensors\)"):
        weight_sync.send((dict(hf_stream(model)) | adapters(5)).items(), engine, 1)


def all_kinds(kind):
    return [each for child in kind.__subclasses__() for each in (child, *all_kinds(child))]
