"""Models and actors with Transformer Engine's layers, in bf16 and each FP8 recipe: control flow, names and shapes."""

import importlib
import os
import pkgutil

import pytest
import torch

import megatron_rft
from megatron_rft.config import Batching, Megatron
from megatron_rft.config.algorithms.offline import SFT as Options
from megatron_rft.conversion import hf_shapes
from megatron_rft.conversion.mapping import Mapping
from megatron_rft.megatron import model as models
from megatron_rft.megatron import optimizer as optimizers
from megatron_rft.megatron import parallel, spec, weights
from megatron_rft.megatron.actor import Actor
from megatron_rft.megatron.checkpoint import Checkpointer
from megatron_rft.megatron.ema import MovingAverage
from megatron_rft.objectives.base import counts
from megatron_rft.objectives.sft import SFT
from megatron_rft.records import Batch
from megatron_rft.utils.checkpoint_files import latest
from tests.families import FAMILIES
from tests.shapes import FOR_KERNELS

EXPERTS = dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128, decoder_sparse_step=1, norm_topk_prob=True
)
# Transformer Engine asks cuDNN which fused attention it has, and cuDNN crashes on the pretended machine.
ATTENTION = "unfused" if "PRETEND_LIBRARY" in os.environ else "auto"
# FP8 with the recipes of Hopper, or of Blackwell (the pretended one: PRETEND_CC=100).
BLACKWELL = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 10
PRECISIONS = ["bf16", "fp8 mxfp8"] if BLACKWELL else ["bf16", "fp8 blockwise", "fp8 tensorwise"]
LENGTHS = (40, 33, 57, 21)  # 147 fed tokens: no multiple of 16, 32 or 128


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    for kernel in ("FLASH", "FUSED", "UNFUSED"):  # the last model's choice, which megatron-core leaves behind
        monkeypatch.delenv(f"NVTE_{kernel}_ATTN", raising=False)
    parallel.initialize(Megatron())
    yield
    parallel.destroy_layout()


def config_of(kind: str):
    import transformers

    changes = EXPERTS if kind == "Qwen3Moe" else {}
    return getattr(transformers, f"{kind}Config")(**FOR_KERNELS | changes, tie_word_embeddings=kind != "Llama")


def build(precision: str = "bf16", seed: int = 0, family: str = "Qwen3", **optimizer) -> Actor:
    kind, _, recipe = precision.partition(" ")
    config = FAMILIES[family] if family in FAMILIES else config_of(family)
    options = {"lr": 1e-3, "clip_grad": 1.0, "use_distributed_optimizer": True, **optimizer}
    layout = Megatron(fp8_recipe=recipe or None, attention_backend=ATTENTION)
    actor = Actor(config, layout, Batching(), kind, optimizer=options)
    actor.load(weights.random_tensors(config, seed))
    return actor


def some_batch() -> Batch:
    generator = torch.Generator().manual_seed(5)
    texts = [torch.randint(0, 512, (length,), generator=generator).tolist() for length in LENGTHS]
    return Batch.of([text[:4] for text in texts], [text[4:] for text in texts])


def step(actor: Actor) -> dict[str, float]:
    return actor.step(some_batch(), SFT(Options()).loss, counts(some_batch()), learning_rate=1e-3)


def test_every_module_imports_with_transformer_engine_visible():
    assert spec.has_transformer_engine()
    for module in pkgutil.walk_packages(megatron_rft.__path__, "megatron_rft."):
        if ".__main__" not in module.name and ".inside." not in module.name:
            importlib.import_module(module.name)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
@pytest.mark.parametrize("kind", ["Qwen3", "Llama", "Qwen3Moe"])
def test_every_weight_has_its_name_and_only_its_name(kind, precision):
    check_names(config_of(kind), precision)


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_weight_of_a_family_has_its_name(kind):
    check_names(FAMILIES[kind], "bf16")


def check_names(config, precision: str) -> None:
    found = dict(weights.named_tensors(models.build(config, Megatron(), precision)))
    mapping = Mapping(config)
    # of experts that are slices of one tensor the first stands for all
    names = [name for ours in found if not mapping.stacked_expert(ours) for name in mapping.hf_names(ours)]
    assert sorted(names) == sorted(hf_shapes(config))
    assert {parameter.device.type for parameter in found.values()} == {"cuda"}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_weights_are_exported_bit_for_bit(precision, tmp_path):
    actor = build(precision)
    weights.save_folder(actor.stream(), tmp_path / "export", actor.hf_config)
    exported = weights.open_folder(tmp_path / "export", actor.hf_config)
    sent = weights.random_tensors(actor.hf_config, seed=0)
    for name in hf_shapes(actor.hf_config):
        assert torch.equal(exported(name), sent(name).bfloat16()), name


@pytest.mark.parametrize("family", ["Qwen3", "Qwen3Moe"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_step_goes_through(precision, family):
    actor = build(precision, family=family)
    assert actor.outputs(some_batch(), frozenset({"logprobs"}))["logprobs"].shape == (sum(LENGTHS) - 16,)
    assert {"loss", "grad_norm", "skipped"} <= step(actor).keys()
    assert all(getattr(each, "fuse_wgrad_accumulation", True) for each in actor.models[0].modules())
    assert actor.models[0].config.gradient_accumulation_fusion  # without apex
    with actor.use_weights(actor.snapshot()):
        actor.outputs(some_batch(), frozenset({"logprobs"}))


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_step_of_a_family_goes_through(kind):
    actor = build(family=kind)
    batch = Batch.of([[1, 2, 3], [4, 5]], [[4, 5, 6, 7], [8, 9]])
    assert actor.outputs(batch, frozenset({"logprobs"}))["logprobs"].shape == (6,)
    assert {"loss", "grad_norm"} <= actor.step(batch, SFT(Options()).loss, counts(batch), learning_rate=1e-3).keys()
    assert len(list(actor.stream())) == len(hf_shapes(actor.hf_config))


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_checkpoint_with_an_average_comes_back_and_the_next_step_goes_through(precision, asynchronous, tmp_path):
    actor = build(precision)
    step(actor)
    average = MovingAverage(actor, 0.25)
    average.update()
    writer = Checkpointer(tmp_path, {"actor": actor}, asynchronous=asynchronous, averages={"teacher": average})
    writer.save(1, {}, {"x": torch.zeros(2)})
    writer.close()
    other = build(precision, seed=1)
    mean = MovingAverage(other, 0.25)
    reader = Checkpointer(tmp_path, {"actor": other}, averages={"teacher": mean})
    reader.load(latest(tmp_path))
    reader.close()
    for ours, theirs in zip(state(other, mean), state(actor, average), strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))  # bits: a number may be NaN here
    step(other)


def state(actor: Actor, average: MovingAverage) -> list[torch.Tensor]:
    return [*average.weights, *actor.snapshot(), *(tensor.cpu() for tensor in actor.optimizer.tensors())]


def test_a_precision_aware_optimizer_is_clipped_where_it_has_its_gradients(monkeypatch):
    asked = []
    plain = optimizers.clip_grad_by_total_norm_fp32
    monkeypatch.setattr(
        optimizers,
        "clip_grad_by_total_norm_fp32",
        lambda *a, **k: asked.append(k["use_decoupled_grad"]) or plain(*a, **k),
    )
    monkeypatch.setattr(optimizers.math, "isfinite", lambda _: True)  # the kernels that would give the norm do nothing
    actor = build(use_precision_aware_optimizer=True)
    actor.backward(some_batch(), SFT(Options()).loss, counts(some_batch()))
    actor.optimizer.step(1e-3)
    assert asked == [True]
