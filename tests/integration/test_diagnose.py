"""`megatron-rft diagnose`: faults are called bugs, and a run without one rounding."""

import json
import math
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, Qwen3MoeConfig

from examples.smollm2 import make_problems
from megatron_rft.commands import main
from megatron_rft.inference.hf import engine as hf
from megatron_rft.inference.vllm import cpu_patches
from megatron_rft.inference.vllm.engine import VLLMEngine
from megatron_rft.megatron.actor import Actor
from megatron_rft.plan.vllm import unusable
from megatron_rft.training import build
from tests.families import SIZES
from tests.integration.tiny import ROOT, train, write_recipe
from tests.smollm2 import smollm2
from tests.unit.inference.tiny import build_model

WORLD = Path(__file__).with_name("world.py")
EPISODES = {
    "environment": {"kind": "own", "episode": f"{WORLD}:Repeat", "max_turns": 3, "turn_tokens": 2, "processes": 1},
    "rollout": {"max_response_tokens": 6, "temperature": 0.8},
}
ROLLOUT = {"max_response_tokens": 6, "temperature": 0.8}
ENGINE = hf.HFEngine


def diagnose(folder: Path, *arguments: str, **sections) -> tuple[int, dict]:
    recipe = write_recipe(folder, **{"rollout": ROLLOUT, "model": {"precision": "bf16"}} | sections)
    status = main.main(["diagnose", str(recipe), *arguments])
    return status, json.loads((folder / "run/diagnosis/diagnosis.json").read_text())


class Swapped(ENGINE):
    """Exchanges two tensors of one shape on their way."""

    def load_weights(self, stream, version):
        one, other = (f"model.layers.{i}.mlp.up_proj.weight" for i in range(2))
        super().load_weights(((({one: other, other: one}).get(name, name), t) for name, t in stream), version)


class Stale(ENGINE):
    """Reads new weights and keeps the first."""

    loaded = False

    def load_weights(self, stream, version):
        if self.loaded:
            list(stream)
            self.weight_version = version
        else:
            super().load_weights(stream, version)
        self.loaded = True


class HalfStale(ENGINE):
    """A part of the computation keeps the first weights, while checksums are those of the last."""

    kept = None

    @torch.no_grad()
    def generate(self, requests, sampling):
        weight = self.model.model.layers[0].mlp.up_proj.weight
        now = weight.clone()
        self.kept = now if self.kept is None else self.kept
        weight.copy_(self.kept)
        found = list(super().generate(requests, sampling))
        weight.copy_(now)
        return found


class Late(ENGINE):
    """Gives each token the log-prob of the one before."""

    def generate(self, requests, sampling):
        for group in super().generate(requests, sampling):
            late = [replace(r, logprobs=r.logprobs[-1:] + r.logprobs[:-1]) for r in group.responses]
            yield replace(group, responses=tuple(late))


@pytest.mark.parametrize("engine", [Swapped, Stale])
def test_wrong_weights_are_named(tmp_path, monkeypatch, capsys, engine):
    monkeypatch.setattr(hf, "HFEngine", engine)
    recipe = write_recipe(tmp_path, rollout=ROLLOUT, model={"precision": "bf16"})
    assert main.main(["diagnose", str(recipe)]) == 3
    assert "in the engine is not what the actor sent" in capsys.readouterr().err


@pytest.mark.parametrize("engine", [HalfStale, Late])
def test_a_faulty_engine_is_a_bug(tmp_path, monkeypatch, engine):
    monkeypatch.setattr(hf, "HFEngine", engine)
    status, found = diagnose(tmp_path)
    assert status == 3 and found["verdict"].startswith("A bug, not rounding"), found


def test_a_wrong_temperature_is_a_bug(tmp_path, monkeypatch):
    right = build.build_sampling

    def warmer(rollout, *rest, **options):
        return right(rollout.model_copy(update={"temperature": 1.1}), *rest, **options)

    monkeypatch.setattr(build, "build_sampling", warmer)
    status, found = diagnose(tmp_path)
    assert status == 3 and found["verdict"].startswith("A bug, not rounding"), found


@pytest.mark.parametrize("sections", [{}, EPISODES, {"model": {"precision": "fp32"}}])
def test_a_clean_run_is_rounding(tmp_path, capsys, sections):
    status, found = diagnose(tmp_path, **sections)
    assert status == 0 and found["verdict"].startswith("Rounding") and not found["bug"]


def make_mixture(folder: Path) -> None:
    """Replaces the model by one with four experts."""
    config = json.loads((folder / "model/config.json").read_text())
    sizes = {name: config[name] for name in ("head_dim", *SIZES)}
    mixture = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    build_model(Qwen3MoeConfig(**sizes, **mixture)).save_pretrained(folder / "model")


@pytest.fixture
def loud(tmp_path) -> dict:
    """The section `model` of a tiny model with large weights: rounding then shows."""
    write_recipe(tmp_path)
    folder = tmp_path / "model"
    model = build_model(AutoConfig.from_pretrained(folder))
    model.save_pretrained(folder)
    return {"initialise": "pretrained", "precision": "bf16"}


def test_an_engine_in_bf16_beside_a_trainer_in_fp32(tmp_path, loud):
    status, found = diagnose(tmp_path, model=loud | {"precision": "fp32"}, rollout=ROLLOUT | {"dtype": "bf16"})
    assert status == 0 and found["verdict"].startswith("Rounding, of the engine"), found


def test_a_fault_in_the_recipes_precision_alone_is_named(tmp_path, loud, monkeypatch, capsys):
    class StaleInHalf(Stale):
        def load_weights(self, stream, version):
            (super() if self.dtype == torch.bfloat16 else super(Stale, self)).load_weights(stream, version)

    monkeypatch.setattr(hf, "HFEngine", StaleInHalf)
    recipe = write_recipe(tmp_path, rollout=ROLLOUT, model=loud)
    assert main.main(["diagnose", str(recipe)]) == 3
    assert "in the engine is not what the actor sent" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, problem",
    [
        (["--run", "/nowhere"], "--run: /nowhere has no checkpoints"),
        (["rollout.placement=server", "rollout.servers=[http://node:8000]"], "rollout.servers: diagnose needs engines"),
    ],
)
def test_what_it_refuses(tmp_path, capsys, arguments, problem):
    recipe = write_recipe(tmp_path, rollout={"engine": "auto"})
    assert main.main(["diagnose", str(recipe), *arguments]) == 2
    assert f"error: {problem}" in capsys.readouterr().err


def test_the_weights_of_a_run(tmp_path):
    """They are those of its checkpoint, and its folder can still be trained on."""
    status, before = diagnose(tmp_path, run={"steps": 2})
    assert status == 0
    recipe = tmp_path / "recipe.yaml"
    status, output = train(recipe)
    assert status == 0, output
    run = tmp_path / "run"
    assert main.main(["diagnose", str(recipe), "--run", str(run)]) == 0
    found = json.loads((run / "diagnosis/diagnosis.json").read_text())
    assert found["in_fp32"] < 1e-9 and found["rows"][0] != before["rows"][0]


def test_adapters_are_measured_as_the_trainer_computes_with_them(tmp_path):
    """Merged in bf16 they lose a small change; an engine in fp32 gets all of it."""
    lora = {"lora": {"rank": 2}, "optimizer": {"lr": 1e-3}, "run": {"steps": 2}, "rollout": ROLLOUT | {"dtype": "fp32"}}
    recipe = write_recipe(tmp_path, **lora | {"model": {"precision": "bf16"}})
    status, output = train(recipe)
    assert status == 0, output
    assert main.main(["diagnose", str(recipe), "--run", str(tmp_path / "run")]) == 0
    found = json.loads((tmp_path / "run/diagnosis/diagnosis.json").read_text())
    assert found["in_fp32"] < 1e-9
    assert main.main(["diagnose", str(recipe), "--run", str(tmp_path / "run"), "rollout.dtype=bf16"]) == 0
    merged = json.loads((tmp_path / "run/diagnosis/diagnosis.json").read_text())
    assert merged["in_fp32"] < 1e-9 < merged["by_engine"]


@pytest.mark.parametrize("kind", ["tensor", "expert"])
def test_ranks(tmp_path, loud, kind):
    if kind == "expert":
        make_mixture(tmp_path)
    recipe = write_recipe(tmp_path, model=loud, rollout=ROLLOUT, megatron={f"{kind}_model_parallel_size": 2})
    status, output = train(recipe, "--nproc", "2", command="diagnose")
    assert status == 0, output
    found = json.loads((tmp_path / "run/diagnosis/diagnosis.json").read_text())
    assert found["verdict"].startswith("Rounding"), found


VLLM = pytest.mark.skipif(unusable() is not None, reason=str(unusable()))


@pytest.fixture(scope="module")
def vllm():
    """vLLM's first import keeps the frames that it is called from, and with them a model and its layout's groups."""
    cpu_patches.prepare()
    import_module("megatron_rft.inference.vllm.weights")


def widen(model: Path) -> None:
    """Gives its heads a size that vLLM's attention has."""
    config = model / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"head_dim": 32}))
    build_model(AutoConfig.from_pretrained(model)).save_pretrained(model)


@VLLM
@pytest.mark.slow
@pytest.mark.usefixtures("vllm")
@pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="vLLM has no FP8 cache on this CPU")
def test_a_cache_in_fp8_is_the_engines_rounding(tmp_path, loud):
    """And without it the KL is far smaller."""
    widen(tmp_path / "model")
    sections = {"rollout": ROLLOUT | {"engine": "vllm"}, "algorithm": {"importance": "truncated"}}
    status, found = diagnose(tmp_path, model=loud, vllm={"kv_cache_dtype": "fp8"}, **sections)
    assert status == 0 and found["verdict"].startswith("Rounding, of the engine"), found
    status, without = diagnose(tmp_path, model=loud, **sections)
    assert status == 0 and without["base"] < found["base"] / 2


@VLLM
@pytest.mark.slow
@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize("side, fault", [("the trainer", (Actor, "outputs")), ("vLLM", (VLLMEngine, "_response"))])
def test_the_side_of_another_bug_is_named(tmp_path, loud, monkeypatch, side, fault):
    """By the hf engine, which agrees with the other side."""
    right = getattr(*fault)

    def noisy(self, *given):
        found = right(self, *given)
        if isinstance(found, dict):
            return found | {"logprobs": found["logprobs"] + 0.1 * torch.arange(len(found["logprobs"])).sin()}
        return replace(found, logprobs=tuple(p + 0.1 * math.sin(i + t) for i, (p, t) in enumerate(pairs(found))))

    def pairs(response):
        return zip(response.logprobs, response.token_ids, strict=True)

    monkeypatch.setattr(*fault, noisy)
    widen(tmp_path / "model")
    status, found = diagnose(tmp_path, model=loud, rollout=ROLLOUT | {"engine": "vllm"})
    assert status == 3 and f": {side} computes something else" in found["verdict"], found


@VLLM
@pytest.mark.slow
@pytest.mark.usefixtures("vllm")
def test_a_pretrained_model_beside_vllm(tmp_path):
    """In fp32 both agree to 5e-11; in bf16 the mismatch is about as large as the trainer's from itself."""
    make_problems.main(tmp_path / "problems")
    options = [f"data.{part}={tmp_path}/problems/{part}.jsonl" for part in make_problems.SIZES]
    options += [f"model.path={smollm2()}", f"run.output_dir={tmp_path}/run", "rollout.group_size=4"]
    recipe = ROOT / "examples/smollm2/grpo_pipo.yaml"
    status, output = train(recipe, "--prompts", "4", *options, command="diagnose", forked=False)
    assert status == 0, output[-3000:]
    found = json.loads((tmp_path / "run/diagnosis/diagnosis.json").read_text())
    assert found["verdict"].startswith("Rounding"), found
    assert found["in_fp32"] < 1e-9 and 1e-4 < found["base"] < 1e-2 and found["floor"] > 1e-5, found
