"""Verification of a sync, with a real engine and with engines that each fail in one way."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from megatron_rft.inference import weight_sync
from megatron_rft.inference.engine import Sampling
from megatron_rft.inference.hf.engine import HFEngine
from megatron_rft.utils.errors import RunFailed
from tests.shapes import sizes
from tests.unit.inference.tiny import build_model, hf_stream

CONFIG = Qwen3Config(**sizes(1, 8, 2, 1, 16, vocab_size=16, head_dim=4), tie_word_embeddings=True)


@pytest.fixture
def tensors() -> list[tuple[str, torch.Tensor]]:
    model = AutoModelForCausalLM.from_config(CONFIG).requires_grad_(False)
    return list(model.named_parameters())


class Exhausted:
    """A stream that knows whether it was read to its end."""

    def __init__(self, pairs):
        self.pairs, self.ended = pairs, False

    def __iter__(self):
        yield from self.pairs
        self.ended = True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_push_loads_all_tensors_and_returns_metrics(tensors, dtype):
    engine, stream = HFEngine(CONFIG, dtype), Exhausted(tensors)
    metrics = weight_sync.send(stream, engine, version=2, verify=True)
    assert engine.weight_version == 2 and stream.ended
    assert metrics["sync/tensors"] == len(tensors) == 13
    assert metrics["sync/bytes"] == 4 * sum(tensor.numel() for _, tensor in tensors)
    assert metrics["sync/seconds"] > 0


def test_the_biases_of_a_router_that_a_bf16_engine_keeps_in_fp32_are_compared():
    model = build_model("glm4_moe")
    engine = HFEngine(model.config, torch.bfloat16)
    assert torch.float32 in {tensor.dtype for tensor in engine.targets.values()}
    weight_sync.send(hf_stream(model), engine, version=1, verify=True)


def test_a_refused_tensor_ends_the_run_after_the_stream_has_ended(tensors):
    tensors[3] = (tensors[3][0], tensors[3][1] * torch.nan)
    stream = Exhausted(tensors)
    with pytest.raises(RunFailed, match=f"version 1: {tensors[3][0]} has non-finite"):
        weight_sync.send(stream, HFEngine(CONFIG), version=1)
    assert stream.ended


def test_after_a_stream_that_broke_off_nothing_is_generated(tensors):
    engine = HFEngine(CONFIG)
    weight_sync.send(tensors, engine, version=1)

    def broken():
        yield tensors[0]
        raise OSError("no actor any more")

    with pytest.raises(OSError, match="no actor"):
        weight_sync.send(broken(), engine, version=2)
    with pytest.raises(RunFailed, match="before any weights were loaded"):
        list(engine.generate([], Sampling(1)))


class Careless(HFEngine):
    """Stops before the last tensor without an error."""

    def load_weights(self, stream, version):
        for _ in range(12):
            next(iter(stream))


class Wrong(HFEngine):
    """Rounds the tensors."""

    def load_weights(self, stream, version):
        super().load_weights(((name, tensor + (1e-3 if "q_norm" in name else 0)) for name, tensor in stream), version)


class Broken(HFEngine):
    def load_weights(self, stream, version):
        next(iter(stream))
        raise OSError("the engine died")


@pytest.mark.parametrize(
    "kind, error, message",
    [
        (Careless, RunFailed, "stopped reading before model.norm.weight"),
        (Wrong, RunFailed, r"q_norm.weight in the engine is not what the actor sent \(1 of 13"),
        (Broken, OSError, "the engine died"),
    ],
)
def test_weight_sync_finds_what_an_engine_does_not_report(tensors, kind, error, message):
    stream = Exhausted(tensors)
    with pytest.raises(error, match=message):
        weight_sync.send(stream, kind(CONFIG), version=1, verify=True)
    assert stream.ended
