"""An adapter of a layer with a fused norm, as Transformer Engine has them, reads the normalised input."""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Qwen3Config

from megatron_rft.config import Batching, Megatron
from megatron_rft.config.lora import Lora
from megatron_rft.conversion import hf_shapes, lora
from megatron_rft.megatron import actor as actors
from megatron_rft.megatron import weights
from megatron_rft.megatron.actor import Actor
from megatron_rft.objectives.base import counts
from megatron_rft.records import Batch
from tests.made import made
from tests.shapes import SMALL

CONFIG = Qwen3Config(**SMALL, max_position_embeddings=64, architectures=["Qwen3ForCausalLM"])
OPTIONS, EPS = Lora(rank=2, alpha=4.0), CONFIG.rms_norm_eps


class Fused:
    """Makes a linear layer that of Transformer Engine: with `return_layernorm_output` it returns two outputs."""

    return_layernorm_output = False

    def forward(self, x):
        x = F.rms_norm(x, x.shape[-1:], self.layer_norm_weight, EPS)
        out, bias = super().forward(x)
        return ((out, x) if self.return_layernorm_output else out), bias


def fuse(norm: nn.Module, linear: nn.Module) -> None:
    linear.__class__ = type("FusedLinear", (Fused, linear.__class__), {})
    linear.layer_norm_weight = norm.weight


def logprobs_and_gradients(fused: bool, monkeypatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Of a model with random norms and adapters."""
    build = actors.models.build

    def built(*args, **options):
        chunks = build(*args, **options)
        for layer in chunks[0].decoder.layers if fused else ():
            fuse(layer.input_layernorm, layer.self_attention.linear_qkv)
            fuse(layer.pre_mlp_layernorm, layer.mlp.linear_fc1)
            layer.input_layernorm = layer.pre_mlp_layernorm = nn.Identity()
        return chunks

    monkeypatch.setattr(actors.models, "build", built)
    actor = Actor(CONFIG, Megatron(), Batching(), "fp32", optimizer={"lr": 1e-3}, lora=OPTIONS)
    monkeypatch.undo()
    generator, start = torch.Generator().manual_seed(2), weights.random_tensors(CONFIG, seed=0)
    actor.load(lambda name: torch.linspace(0.5, 2, len(start(name))) if "norm" in name else start(name))
    shapes = lora.shapes(CONFIG, OPTIONS)
    given = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    actor.load(given.__getitem__, adapters=True)
    ids = torch.randint(0, CONFIG.vocab_size, (3, 8), generator=generator).tolist()
    batch = Batch.of([row[:3] for row in ids], [row[3:] for row in ids])
    found = actor.outputs(batch, frozenset({"logprobs"}))["logprobs"]
    actor.backward(batch, made("sft").loss, counts(batch))
    return found, {name: p.main_grad.clone() for name, p in weights.named_tensors(actor.models, adapters=True)}


def test_it_reads_the_normalised_input(one_rank, monkeypatch):
    plain, gradients = logprobs_and_gradients(False, monkeypatch)
    fused, others = logprobs_and_gradients(True, monkeypatch)
    torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-5)
    assert len(gradients) == len(others) == 16
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, rtol=1e-4, atol=1e-5)


def test_merged_weights_are_rounded_to_the_engines_dtype_alone(one_rank):
    """A small change survives in fp32, where a bf16 sum loses most of it."""
    actor = Actor(CONFIG, Megatron(), Batching(), "bf16", lora=OPTIONS)
    generator = torch.Generator().manual_seed(0)
    start, shapes = weights.random_tensors(CONFIG, seed=0), lora.shapes(CONFIG, OPTIONS)
    actor.load(start)
    given = {name: 0.002 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    actor.load(given.__getitem__, adapters=True)
    base = {name: start(name).to(torch.bfloat16).float() for name in hf_shapes(CONFIG)}
    rounded, exact = dict(actor.stream()), dict(actor.stream(dtype=torch.float32))
    apart = {name: tensor.float() for name, tensor in actor.stream(adapters=True)}
    for name, tensor in exact.items():
        assert torch.equal(tensor.to(torch.bfloat16), rounded[name])
        if f"{name.removesuffix('.weight')}.lora_A.weight" in apart:
            a, b = (apart[f"{name.removesuffix('.weight')}.lora_{part}.weight"] for part in "AB")
            change = OPTIONS.scale * (b @ a)
            assert tensor.dtype == torch.float32 and rounded[name].dtype == torch.bfloat16
            torch.testing.assert_close(tensor - base[name], change, rtol=0, atol=1e-8)
            assert (rounded[name].float() - base[name] - change).norm() > 0.5 * change.norm()
        else:
            assert tensor.dtype == torch.bfloat16
