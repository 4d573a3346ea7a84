"""`megatron-rft rehearse`: recipes of examples/ at full size, in processes without a GPU.

The models are folders with a config.json of known sizes and nothing else. One process serves most tests.
"""

import json
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import pytest

from megatron_rft.commands import main
from megatron_rft.commands import rehearse as command
from megatron_rft.commands.parser import parse
from megatron_rft.commands.rehearse import Rehearsal, Worker
from megatron_rft.config import load
from megatron_rft.conversion import load_config
from megatron_rft.plan.layout import Layout
from megatron_rft.plan.memory import update_memory
from megatron_rft.plan.model_shape import read_shape
from megatron_rft.plan.shared_prompts import SharedGroup
from megatron_rft.rehearsal import report
from megatron_rft.rehearsal.report import Stage
from megatron_rft.utils.errors import ConfigError, RunFailed
from tests.shapes import sizes

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
COMMON = dict(
    architectures=["Qwen3ForCausalLM"],
    model_type="qwen3",
    hidden_act="silu",
    rms_norm_eps=1e-6,
    rope_theta=1_000_000,
    attention_bias=False,
    tie_word_embeddings=False,
    vocab_size=151_936,
    max_position_embeddings=40_960,
    initializer_range=0.02,
    head_dim=128,
)
EXPERTS = dict(
    architectures=["Qwen3MoeForCausalLM"],
    model_type="qwen3_moe",
    norm_topk_prob=True,
    decoder_sparse_step=1,
    mlp_only_layers=[],
)


def experts(count, each, chosen):
    return EXPERTS | dict(num_experts=count, moe_intermediate_size=each, num_experts_per_tok=chosen)


WINDOWS = dict(layer_types=["sliding_attention", "full_attention"], rope_theta=5e5, sliding_window=1024)
GEMMA = dict(architectures=["Gemma3ForCausalLM"], model_type="gemma3_text", rms_norm_eps=1e-6) | WINDOWS
GEMMA |= dict(vocab_size=262_208, max_position_embeddings=131_072, head_dim=256, tie_word_embeddings=True)
OLMO = dict(architectures=["Olmo3ForCausalLM"], model_type="olmo3", rms_norm_eps=1e-6) | WINDOWS
OLMO |= dict(vocab_size=100_278, max_position_embeddings=65_536, tie_word_embeddings=False)
TINY = dict(vocab_size=512, head_dim=16)
MODELS = {
    "tiny": COMMON | sizes(4, 64, 4, 2, 128, **TINY),
    "tiny_mixture": COMMON | sizes(4, 64, 4, 2, 128, **TINY, **experts(8, 32, 2)),
    "8b": COMMON | sizes(36, 4096, 32, 8, 12_288),
    "8b_4_layers": COMMON | sizes(4, 4096, 32, 8, 12_288),
    "8b_2_layers": COMMON | sizes(2, 4096, 32, 8, 12_288),
    "32b": COMMON | sizes(64, 5120, 64, 8, 25_600),
    "gemma3_4b_2_layers": GEMMA | sizes(2, 2560, 8, 4, 10_240),
    "olmo3_7b_2_layers": OLMO | sizes(2, 4096, 32, 32, 11_008),
    "30b_a3b_16_layers": COMMON | sizes(16, 2048, 32, 4, 6144, **experts(128, 768, 8)),
}


def load_hf(folder, model):
    """The configuration of `model`, written into a folder of its name."""
    (folder / model).mkdir(exist_ok=True)
    (folder / model / "config.json").write_text(json.dumps(MODELS[model]))
    return load_config(folder / model)


@pytest.fixture(scope="module")
def worker():
    with Worker() as shared:
        yield shared


@pytest.fixture
def rehearse(tmp_path, capsys, worker, monkeypatch):
    """(exit status, stdout, stderr, stages as in --json)."""
    monkeypatch.setattr(command, "Worker", lambda: nullcontext(worker))

    def run(recipe, model, gpus, *arguments):
        folder = tmp_path / model
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(MODELS[model]))
        out = tmp_path / "counts.json"
        words = ["rehearse", str(EXAMPLES / recipe), f"model.path={folder}", "--gpus", str(gpus), "--json", str(out)]
        if "tiny" in model:  # a few sequences in a micro-batch: each has operations of its own
            words.append("batching.micro_batch_tokens=512")
        status = main.main([*words, *arguments])
        told = capsys.readouterr()
        return status, told.out, told.err, json.loads(out.read_text()) if out.is_file() else []

    return run


def of_group(stage, phase, group):
    """{collective: (calls, bytes)} of a phase in one process group."""
    found = {}
    for row in stage["found"]["links"]:
        if row[0] == phase and row[3].startswith(group):
            calls, size = found.get(row[2], (0, 0))
            found[row[2]] = (calls + row[6], size + row[7])
    return found


def test_a_whole_step_of_ppo_with_pipo_over_two_stages(rehearse):
    layout = ["megatron.pipeline_model_parallel_size=2", "megatron.tensor_model_parallel_size=2"]
    layout += ["megatron.sequence_parallel=true", "model.precision=bf16", "batching.micro_batch_tokens=1024"]
    layout += ["rollout.prompts_per_step=64", "algorithm.mini_batch_prompts=64"]
    status, told, _, stages = rehearse("pipo/tiny/ppo_pipo.yaml", "tiny", 8, *layout)
    assert status == 0, told
    assert "TP 2 x PP 2 x CP 1 x DP 2" in told and "fits" in told.splitlines()[-1]
    first, last = stages
    phases = {"log-probs", "critic's values", "verification", "critic's training", "training", "weights to the engine"}
    assert phases <= set(first["found"]["peaks"]) and (first["rank"], last["rank"]) == (0, 4)
    assert phases <= set(last["found"]["peaks"])
    for phase in ("verification", "training"):
        micro_batches = first["found"]["micro_batches"][phase]
        sent = of_group(first, phase, "pipeline")["send"][0]
        assert sent == 2 * micro_batches  # a shape and hidden states
        assert of_group(last, phase, "pipeline")["send"] == of_group(first, phase, "pipeline")["recv"]
        reduced = of_group(first, phase, "data")["reduce_scatter_tensor"][1]
        gradients = first["found"]["peaks"][phase]["parts"]["gradients"]
        assert 0 < reduced < gradients  # the policy's alone; the critic has its own
    assert "log-prob blocks" in last["found"]["peaks"]["training"]["parts"]
    for stage in stages:
        check_waits(stage)
        weights = stage["found"]["peaks"]["training"]["parts"]["weights"]  # of the policy and the critic
        assert stage["found"]["uploads"]["loading"][1] == pytest.approx(weights, rel=0.02)
        assert 0 < stage["found"]["host"]["loading"] < weights / 2  # a tensor at a time


def check_waits(stage):
    """The host waits for the device at most ten times per micro-batch, for any number of layers."""
    stage = report.Stage(stage["number"], 1, 1, stage["rank"], stage["found"])
    waits = {phase: [row for row in stage.rows(phase, "waits") if row[1] != "optimizer"] for phase in stage.phases}
    counts = stage.found["micro_batches"]
    found = {phase: sum(row[-1] for row in waits[phase]) / max(1, count) for phase, count in counts.items()}
    assert found and max(found.values()) <= 10, (found, stage.found["waits"])


SHORT = ["data.max_prompt_tokens=64", "rollout.max_response_tokens=64", "batching.micro_batch_tokens=512"]


@pytest.mark.parametrize(
    "recipe", ["dynamic/tiny/dynamic.yaml", "fpa/qwen3_4b_base/dpo.yaml", "pipo/tiny/sdpo.yaml", "quickstart/sft.yaml"]
)
def test_few_waits_with_refined_responses_pairs_and_a_teacher(rehearse, recipe):
    options = ["model.precision=bf16", "--micro-batches", "1", *(SHORT if "4b" in recipe else ())]
    status, told, error, (stage,) = rehearse(recipe, "tiny", 1, *options)
    assert status == 0, told + error
    check_waits(stage)
    assert sum(row[-1] for row in stage["found"]["waits"] if row[0] == "end of the step") <= 1  # the teacher's update


@pytest.mark.parametrize(
    "recipe, options",
    [
        ("pipo/tiny/grpo.yaml", ["distil={teacher: DIR, coefficient: 0.5}"]),
        ("fpa/qwen3_4b_base/kto.yaml", [*SHORT, "algorithm={name: offline_distil, beta: null, teacher: DIR}"]),
        ("quickstart/distil.yaml", ["algorithm.teacher={a: DIR, b: DIR}", "data.teacher_field=kind"]),
    ],
)
def test_a_distillations_teachers(rehearse, recipe, options, tmp_path):
    (tmp_path / "teacher").mkdir()
    (tmp_path / "teacher/config.json").write_text(json.dumps(COMMON | sizes(6, 96, 4, 2, 192, **TINY)))
    options = [each.replace("DIR", f"{tmp_path}/teacher") for each in options] + ["model.precision=bf16"]
    status, told, error, (stage,) = rehearse(recipe, "tiny", 1, *options, "--micro-batches", "1")
    assert status == 0, told + error
    assert "second distribution" in stage["found"]["peaks"]


def test_the_trainers_state_leaves_while_the_engine_generates(rehearse, tmp_path):
    options = ["rollout.offload_trainer=true", "model.precision=bf16", "--micro-batches", "1"]
    status, told, error, (stage,) = rehearse("pipo/tiny/grpo.yaml", "tiny", 1, *options)
    assert status == 0, told + error
    left, before = (stage["found"]["peaks"][phase]["parts"] for phase in ("generation", "training"))
    assert left["weights"] == before["weights"] > 0
    assert before["gradients"] > 0 and before["optimizer"] > 0 and not left["gradients"]
    assert left["optimizer"] < before["optimizer"] / 10


def test_bad_input_is_one_sentence(rehearse):
    recipe = "pipo/tiny/grpo_pipo.yaml"
    for arguments, says in (
        (["--device", "h300"], "there is no device 'h300'"),
        (["--fraction", "2"], "no share of the longest response"),
        (["megatron.tensor_model_parallel_size=3"], "attention heads do not divide by TP 3"),
        (["model.path=Qwen/Qwen3-8B-Base-nowhere"], "is not on this machine, and rehearse needs its config.json"),
    ):
        status, _, error, _ = rehearse(recipe, "tiny", 6, *arguments)
        assert status == 2 and says in error and "Traceback" not in error, error


def test_training_only_has_the_peaks_of_a_whole_rehearsal(rehearse):
    recipe, found = "pipo/tiny/grpo_pipo.yaml", []
    for more in ([], ["--training-only"]):
        status, told, error, (stage,) = rehearse(
            recipe, "tiny", 1, "model.precision=bf16", "--micro-batches", "1", *more
        )
        assert status == 0, told + error
        found.append({phase: peak["total"] for phase, peak in stage["found"]["peaks"].items()})
    whole, part = found
    assert {"log-probs", "verification"} <= set(whole) - set(part)
    assert part["loading"] == whole["loading"] and part["training"] == pytest.approx(whole["training"], rel=0.01)


def test_a_rank_that_fails_tells_why():
    with Worker() as own:
        with pytest.raises(RunFailed, match=r"rank 3 of 8 failed in its rehearsal:\n(?s:.*)argument 'wrong'"):
            own.rehearse({"rank": 3, "world": 8, "wrong": 1})
        with pytest.raises(RunFailed, match="rank 4 of 8"):  # the process has ended
            own.rehearse({"rank": 4, "world": 8})


def test_what_does_not_fit_names_its_stage_categories_and_help(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODELS["8b"]))
    words = ["rehearse", str(EXAMPLES / "pipo/qwen3_8b_base/grpo.yaml"), f"model.path={tmp_path}"]
    rehearsal = Rehearsal(parse([*words, "megatron.pipeline_model_parallel_size=2"]))
    parts = {"weights": 20 << 30, "activations": 70 << 30, "buckets": 1 << 30}
    found = {"peaks": {"start": {"total": 0, "parts": {}}, "training": {"total": 91 << 30, "parts": parts}}}
    with pytest.raises(ConfigError) as error:
        rehearsal.check_fits([Stage(1, 2, 1, 4, found)])
    told = str(error.value)
    assert "out of memory: stage 2 of 2 needs 91.00 GiB in training, and there are 78.15 GiB (H100" in told
    assert "most of it: activations 70.00, weights 20.00" in told and "\n" not in told
    helps = told.split("by the plan's arithmetic: ")[1].split("; ")
    assert 1 <= len(helps) <= 3 and all(" GiB less)" in each for each in helps)
    parts["activations"] = 7 << 30
    found["peaks"]["training"]["total"] = 28 << 30
    assert "50.15 GiB are left at the peak, stage 2 of 2 in training" in rehearsal.check_fits(
        [Stage(1, 2, 1, 4, found)]
    )


def test_a_folder_without_config_is_named(tmp_path, capsys):
    assert main.main(["rehearse", str(EXAMPLES / "pipo/tiny/grpo.yaml"), f"model.path={tmp_path}"]) == 2
    assert "has no config.json" in capsys.readouterr().err


EVERYTHING = {
    "context_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "virtual_pipeline_model_parallel_size": 2,
    "expert_model_parallel_size": 2,
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def test_contexts_virtual_stages_experts_and_recompute(tmp_path, worker):
    options = [f"megatron.{key}={value}" for key, value in EVERYTHING.items()]
    options += ["model.precision=bf16", "batching.micro_batch_tokens=128"]
    found = one_stage(worker, tmp_path, "pipo/tiny/grpo.yaml", "tiny_mixture", 8, options, 0)["found"]
    groups = {row[3].split()[0] for row in found["links"] if row[0] == "training"}
    assert {"context", "expert", "pipeline"} <= groups
    flops = {row[1]: row[3] for row in found["kernels"] if row[0] == "training"}
    assert flops["backward"] == pytest.approx(3 * flops["forward"], rel=0.1)  # of it a third is the second forward


# ---- at full size

NODE = {
    "grpo with pipo": ("pipo/qwen3_8b_base/grpo_pipo.yaml", "8b_2_layers"),
    "ppo with pipo, a critic": ("pipo/qwen3_8b_base/ppo_pipo.yaml", "8b_2_layers"),
    "sdpo with pipo, a teacher": ("pipo/qwen3_8b/sdpo_pipo.yaml", "8b_2_layers"),
    "dapo with a refiner": ("dynamic/apps_dapo/dynamic.yaml", "8b_2_layers"),
    "fpa, a second distribution": ("fpa/qwen3_4b_base/fpa.yaml", "8b_2_layers"),
    "dpo, pairs": ("fpa/qwen3_4b_base/dpo.yaml", "8b_2_layers"),
}
PARTS = {
    "ppo with pipo, a critic": "critic's training",
    "sdpo with pipo, a teacher": "verification",
    "fpa, a second distribution": "training",
}


def check_plan(stage, recipe, model_folder, gpus, *overrides, within=0.1):
    """Compares the plan's bytes with the training phase's peak, for the tokens of the largest micro-batch."""
    options = load(EXAMPLES / recipe, [f"model.path={model_folder}", "model.initialise=random", *overrides])
    s, layout, number = read_shape(model_folder), Layout.of(options.megatron, gpus), stage["number"]
    found, peak = stage["found"], stage["found"]["peaks"]["training"]
    tokens = found["largest"]["training"] * layout.cp
    batching = options.batching.model_copy(update={"micro_batch_tokens": tokens})
    keys = SharedGroup.of(options, s, layout, 0.5).keys
    state, estimate = update_memory(options, batching, keys, s, layout, number)
    assert peak["parts"]["weights"] == pytest.approx(state.weights, rel=0.01)
    assert found["uploads"]["loading"][1] == pytest.approx(state.weights, rel=0.01)  # each weight once
    assert peak["parts"]["gradients"] == pytest.approx(state.gradients, rel=0.01)
    both = state.total + estimate, peak["total"]
    assert both[0] == pytest.approx(both[1], rel=within), (peak["parts"], state, estimate)


@pytest.mark.slow
@pytest.mark.parametrize("name", NODE)
def test_a_family_on_its_node(rehearse, tmp_path, name):
    recipe, model = NODE[name]
    status, told, error, (stage,) = rehearse(recipe, model, 8, "--micro-batches", "1")
    assert status == 0, told + error
    assert PARTS.get(name, "training") in stage["found"]["peaks"]
    check_plan(stage, recipe, tmp_path / model, 8)


EXPERTS_ON_8 = dict(tensor=4, expert=8, expert_tensor=1)
EXAMPLE = "pipo/qwen3_8b_base/grpo.yaml"
FULL = dict(granularity="full", method="uniform", num_layers=1)
LAYOUTS = {
    "contexts": ["megatron.context_parallel_size=2"],
    "virtual stages, attention recomputed": [
        "megatron.pipeline_model_parallel_size=2",
        "megatron.virtual_pipeline_model_parallel_size=2",
        "megatron.recompute_granularity=selective",
    ],
    "all recomputed": [f"megatron.recompute_{key}={value}" for key, value in FULL.items()],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_memory_of_a_layout(tmp_path, worker, name):
    options = [*LAYOUTS[name], "batching.micro_batch_tokens=8192"]
    stage = one_stage(worker, tmp_path, EXAMPLE, "8b_4_layers", 8, options, 0, "--training-only")
    check_plan(stage, EXAMPLE, tmp_path, 8, *options)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gemma3_4b_2_layers", "olmo3_7b_2_layers"])
def test_memory_of_layers_with_windows(tmp_path, worker, model):
    options = ["batching.micro_batch_tokens=8192"]
    check_plan(one_stage(worker, tmp_path, EXAMPLE, model, 8, options, 0), EXAMPLE, tmp_path, 8, *options)


MANY = {  # model, ranks, layout, the stage that is rehearsed (from 0), and whether with all phases of a step
    "32B on 64, first stage": ("32b", 64, dict(tensor=8, pipeline=8), 0, False),
    "32B on 512, last stage": ("32b", 512, dict(tensor=8, pipeline=8), 7, False),
    "32B on 4,096, second of 16": ("32b", 4096, dict(tensor=8, pipeline=16, context=2), 1, True),
    "30B-A3B on 64, last stage": ("30b_a3b_16_layers", 64, dict(pipeline=8, **EXPERTS_ON_8), 7, True),
    "30B-A3B on 512, second stage": ("30b_a3b_16_layers", 512, dict(pipeline=8, **EXPERTS_ON_8), 1, False),
    "30B-A3B on 4,096, first of 16": ("30b_a3b_16_layers", 4096, dict(pipeline=16, **EXPERTS_ON_8), 0, True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MANY)
def test_many_gpus(tmp_path, worker, name):
    """Rehearses one micro-batch on the last stage, and as many as are in flight on the first. The mixture has fewer
    layers than the published one: test_shipped_memory.py is about all of them."""
    model, gpus, layout, number, whole = MANY[name]
    options = [
        f"megatron.{key}_{'' if key in ('context', 'expert_tensor') else 'model_'}parallel_size={size}"
        for key, size in layout.items()
    ]
    options += [
        "rollout.prompts_per_step=2048",
        "algorithm.mini_batch_prompts=1024",
        "batching.micro_batch_tokens=8192",
    ]
    more = [] if whole else ["--training-only"]
    stage = one_stage(worker, tmp_path, EXAMPLE, model, gpus, options, number, *more)
    assert stage["found"]["rss"] < 4 << 30
    check_plan(stage, EXAMPLE, tmp_path, gpus, *options)


def one_stage(worker, folder, recipe, model, gpus, options, number, *more):
    """The stage as in --json. `folder` gets the model's config.json."""
    (folder / "config.json").write_text(json.dumps(MODELS[model]))
    words = ["rehearse", str(EXAMPLES / recipe), f"model.path={folder}", *options, "--gpus", str(gpus), *more]
    return asdict(Rehearsal(parse(words)).stage(number, worker))
