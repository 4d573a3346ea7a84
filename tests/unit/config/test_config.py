"""Recipes: inheritance, overrides, refusals with their messages, and the arithmetic of a plan."""

import json
import re
from pathlib import Path
from typing import get_args

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rft import config
from megatron_rft.config import difference, dump, load
from megatron_rft.config.passthrough import SOURCES, fields, reason_to_refuse, refused
from megatron_rft.config.sections import Section
from megatron_rft.megatron.model import fields_of
from megatron_rft.plan import check, checks
from megatron_rft.plan.layout import Layout, possible, problems
from megatron_rft.plan.model_shape import ModelShape
from megatron_rft.utils.errors import ConfigError, DataError, UserError
from tests.shapes import json_of, sizes, write_model

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
RECIPES = sorted(
    p for p in EXAMPLES.rglob("*.yaml") if p.parent.name not in ("parts", "grids") and p.name != "common.yaml"
)
ON_HUB = [path for path in RECIPES if path.is_relative_to(EXAMPLES / "dynamic") and "tiny" not in path.parts]
SHAPE = sizes(4, 128, 4, 2, 384, vocab_size=256, max_position_embeddings=2048, architectures=["Qwen3ForCausalLM"])


@pytest.fixture
def recipe(tmp_path):
    """Path of a minimal RL recipe, in a folder with a model."""
    write_model(tmp_path / "model", SHAPE)
    path = tmp_path / "rl.yaml"
    model = f"model: {{path: {tmp_path}/model}}"
    path.write_text(
        f"run: {{output_dir: {tmp_path}/out, steps: 10}}\n{model}\n"
        "data: {train: examples/quickstart/arithmetic.py:rows}\n"
    )
    return path


def refusal(recipe: Path, *overrides: str, world_size: int | None = None) -> str:
    """The error message."""
    with pytest.raises(UserError) as caught:
        loaded = load(recipe, list(overrides))
        if world_size:
            check(loaded, world_size)
    return str(caught.value)


class TestLoading:
    def test_defaults_and_overrides(self, recipe):
        loaded = load(recipe, ["optimizer.lr=1e-5", "pipo.window=4", "rollout.stop=[7, ';']"])
        assert loaded.algorithm.name == "grpo" and loaded.optimizer.lr == 1e-5
        assert loaded.pipo.window == 4 and loaded.rollout.stop == [7, ";"]

    def test_the_short_form_of_a_data_set_takes_options(self, recipe):
        options = ["data.train.limit=40", "evaluation.benchmarks.amc=amc23", "evaluation.benchmarks.amc.samples=32"]
        found = load(recipe, options)
        assert (found.data.train.path, found.data.train.limit) == ("examples/quickstart/arithmetic.py:rows", 40)
        amc = found.evaluation.benchmarks["amc"]
        assert (amc.adapter, amc.samples) == ("amc23", 32)
        other = load(
            recipe, ["data.train=math500", "data.train={path: examples/quickstart/arithmetic.py:rows}"]
        ).data.train
        assert (other.path, other.adapter) == ("examples/quickstart/arithmetic.py:rows", None)

    def test_null_is_a_value_only_where_it_is_the_default(self):
        """null takes the default: an option with another one could never be null."""
        kinds = [Section]
        for kind in kinds:
            kinds += kind.__subclasses__()
        for kind in kinds:
            for name, option in kind.model_fields.items() if kind.__module__.startswith("megatron_rft.") else ():
                takes_null = type(None) in (option.annotation, *get_args(option.annotation))
                assert not takes_null or option.default is None, f"{kind.__name__}.{name}"

    def test_base_merges_and_null_removes(self, recipe):
        child = recipe.parent / "sub" / "child.yaml"
        child.parent.mkdir()
        child.write_text("base: ../middle.yaml\nrollout: {group_size: 4}\npipo: null\n")
        (recipe.parent / "middle.yaml").write_text(
            "base: rl.yaml\npipo: {window: 3}\nrollout: {group_size: 2, temperature: 0.5}\n"
        )
        loaded = load(child)
        assert (loaded.rollout.group_size, loaded.rollout.temperature, loaded.pipo) == (4, 0.5, None)

    def test_circles_are_refused(self, recipe):
        (recipe.parent / "a.yaml").write_text("base: b.yaml\n")
        (recipe.parent / "b.yaml").write_text("base: a.yaml\n")
        with pytest.raises(ConfigError, match=r"circle: .*a\.yaml -> .*b\.yaml -> .*a\.yaml"):
            load(recipe.parent / "a.yaml")

    def test_dump_loads_to_the_same(self, recipe, tmp_path):
        for overrides in (["pipo.window=4"], ["trainer=sft", "run.steps=null", "run.epochs=2"]):
            loaded = load(recipe, [*overrides, "megatron.overlap_grad_reduce=true"])
            (tmp_path / "dumped.yaml").write_text(dump(loaded))
            assert load(tmp_path / "dumped.yaml") == loaded

    @pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(EXAMPLES)))
    def test_examples_load(self, path):
        assert load(path).run.output_dir

    @pytest.mark.parametrize("path", ON_HUB, ids=lambda path: str(path.relative_to(EXAMPLES)))
    def test_examples_have_a_plan(self, path):
        """On eight ranks, without the network: hub models need not be present."""
        assert "constraint:" in str(check(load(path), world_size=8)) or load(path).constraint.kind == "none"

    @given(
        st.recursive(
            st.none() | st.booleans() | st.integers(), lambda inner: st.dictionaries(st.sampled_from("abc"), inner)
        )
    )
    @settings(max_examples=50)
    def test_override_nests_any_value(self, value):
        assert config.loading.parse_override(f"x.y={yaml.safe_dump(value, default_flow_style=True)}") == {
            "x": {"y": value}
        }


@pytest.mark.parametrize(
    "override, words",
    [
        ("rolout.group_size=2", "the command line: rolout: there is no such option. Did you mean 'rollout'?"),
        ("algorithm.clip_lw=1", "algorithm.clip_lw: there is no such option. Did you mean 'clip_low'?"),
        ("rollout.group_size=many", "rollout.group_size: 'many' is not a whole number"),
        ("rollout.group_size=2.5", "2.5 is not a whole number"),
        ("rollout.group_size=1e1", "rollout.group_size: 10.0 has a decimal point or an exponent: write 10"),
        ("group_size=4", "group_size: there is no such option. Did you mean rollout.group_size?"),
        ("run.group_size=4", "run.group_size: there is no such option. Did you mean rollout.group_size?"),
        ("seed=4", "seed: there is no such option. Did you mean run.seed?"),
        (
            "data.prompt_template={word}",
            "data.prompt_template: is not text: YAML reads {...}, [...] and off as values. Quote",
        ),
        ("run.output_dir=off", "run.output_dir: is not text: YAML reads {...}, [...] and off as values. Quote"),
        (
            "data={prompt_field: word, prompt_template: boxed}",
            "data.prompt_field: does nothing: data.prompt_template does not have {word}",
        ),
        ("rollout.group_size=true", "true is not a whole number"),
        ("run.steps=0", "run.steps: 0 is not at least 1"),
        ("rollout.engine=vlm", "'vlm' is not one of auto, hf, vllm. Did you mean 'vllm'?"),
        ("algorithm.name=dap", "'dap' is not one of ppo, grpo,"),
        ("rollout=3", "rollout: 3 is not a section of options"),
        ("rollout.top_p=0.9", "rollout.top_p: needs top_k (at most 64)"),
        ("rollout.min_p=0.1", "rollout.min_p: needs top_k"),
        ("rollout.top_k=65", "64"),
        ("pipo.window=1", "1 is not at least 2"),
        ("run.output_dir=null", "run.output_dir: is required"),
        ("run.steps=null", "run.steps: is required with trainer rl"),
        ("run.epochs=1", "run.epochs: does nothing with trainer rl"),
        ("trainer=sft", None),
        ("algorithm.name=sft", "'sft' does not belong to trainer rl"),
        ("megatron.tensor_model_paralel_size=2", "Did you mean 'tensor_model_parallel_size'?"),
        ("megatron.calculate_per_token_loss=true", "set by this package: losses are sums"),
        ("megatron.bf16=true", "model.precision"),
        ("megatron.variable_seq_lengths=true", "differ in length"),
        ("megatron.moe_aux_loss_coeff=0.01", "would add a term to the loss"),
        ("megatron.hidden_size=64", "config.json"),
        ("megatron.overlap_grad_reduce=3", "does not fit its type in the installed megatron-core, bool"),
        (
            "megatron.moe_token_dispatcher_type=all",
            "'all' is not one of allgather, alltoall, flex. Did you mean 'alltoall'",
        ),
        ("megatron.fp8_recipe=mxfp8", "does nothing with model.precision bf16"),
        (["model.precision=fp8", "megatron.fp8_recipe=delayed"], "does not load the scales"),
        (["pipo.optimizer_state=own", "optimizer.use_precision_aware_optimizer=true"], "leave one of the two out"),
        (["pipo.optimizer_state=own", "optimizer.optimizer_cpu_offload=true"], "leave one of the two out"),
        (["optimizer.optimizer_cpu_offload=true"], "needs optimizer.use_precision_aware_optimizer=true"),
        (
            ["optimizer.optimizer_cpu_offload=true", "optimizer.use_precision_aware_optimizer=true"],
            "does nothing without optimizer_offload_fraction",
        ),
        ("optimizer.optimizer_offload_fraction=0.5", "does nothing without optimizer_cpu_offload"),
        ("optimizer.pin_cpu_grads=false", "does nothing without optimizer_cpu_offload"),
        ("optimizer.use_torch_optimizer_for_cpu_offload=true", "changes nothing in the installed megatron-core"),
        ("megatron.recompute_modules=[mlp]", "does nothing unless recompute_granularity is selective"),
        (
            "evaluation.benchmarks.a={path: math500, reward: {kind: choice, weight: 2.0}}",
            "evaluation.benchmarks.a.reward.weight: is for the parts of a sum",
        ),
        ("megatron.fp8_param_gather=true", "keeps the weights themselves in FP8"),
        ("megatron.delay_wgrad_compute=true", "needs megatron-core's schedule"),
        ("megatron.recompute_method=block", "does nothing unless recompute_granularity is full"),
        ("megatron.recompute_modules=[mlp]", "does nothing unless recompute_granularity is selective"),
        ("megatron.distribute_saved_activations=true", "does nothing unless recompute_granularity is full"),
        ("megatron.first_last_layers_bf16=true", "does nothing with model.precision bf16"),
        ("megatron.fp8_amax_history_len=16", "belongs to the scaling `delayed`"),
        ("megatron.masked_softmax_fusion=true", "that no layer here has"),
        ("optimizer.min_lr=1e-7", "does nothing with lr_decay_style constant"),
        ("optimizer.sgd_momentum=0.5", "trains with Adam"),
        ("evaluation.every=5", "does nothing without data.validation"),
        (["data.test=gsm8k", "evaluation={samples: 4, temperature: 0}"], "samples: does nothing at evaluation.temp"),
        ("data.train={path: a.jsonl, split: test}", "split: does nothing for a file"),
        ("no-equals-sign", "is not an override"),
        ("run.steps=", "the override 'run.steps=' has no value: run.steps=null takes the default"),
        ("run.steps=[", "is not valid YAML"),
        ("run.steps=" + "[" * 100_000, "[...': its values are nested more deeply than can be read"),
        ("run.steps=" + "9" * 6000, "9...' is not valid YAML (line 1: Exceeds the limit"),
        (
            "run={steps: 1, steps: 2}",
            "the override 'run={steps: 1, steps: 2}' is not valid YAML (line 1: 'steps' is giv",
        ),
        ("run.name=\udcff", "is not UTF-8 text"),
        ("run.seed=99999999999999999999", "run.seed: 99999999999999999999 is not below 9223372036854775808"),
        ("run.output_dir=$HOME/run", "run.output_dir: '$HOME/run': $HOME is not replaced in a recipe"),
        ("model.path=${oc.env:HOME}/m", "model.path: '${oc.env:HOME}/m': ${oc.env:HOME} is not replaced in a recipe"),
        ("data.train=''", "data.train.path: '' cannot be the name of a file or a folder"),
        ("run.output_dir=runs/" + "a" * 256, "... cannot be the name of a file or a folder"),
        ('run.output_dir="a\\0b"', "run.output_dir: 'a\\x00b' cannot be the name of a file or a folder"),
    ],
)
def test_a_refusal_names_option_value_and_fix(recipe, override, words):
    if words is None:  # with a run of steps, sft is fine
        assert load(recipe, [override]).algorithm.name == "sft"
    else:
        assert words in refusal(recipe, *([override] if isinstance(override, str) else override))


@pytest.mark.parametrize(
    "path, why",
    [
        ("dynamic/tiny/dynamic.yaml", "refined responses were not sampled from the kept tokens"),
        ("smollm2/trajectories.yaml", "does nothing with trainer generate"),
    ],
)
def test_truncation_is_refused_where_the_kept_tokens_are_missing(path, why):
    with pytest.raises(ConfigError, match=f"rollout.top_k: .*{why}"):
        load(EXAMPLES / path, ["rollout.top_k=20"])


def test_error_names_the_file_it_stands_in(recipe):
    (recipe.parent / "child.yaml").write_text("base: rl.yaml\nrollout: {temperatur: 1}\n")
    assert refusal(recipe.parent / "child.yaml").startswith(f"{recipe.parent / 'child.yaml'}: rollout.temperatur: ")
    recipe.write_text(recipe.read_text() + "rollout: {group: 1}\n")
    (recipe.parent / "child.yaml").write_text("base: rl.yaml\n")
    assert refusal(recipe.parent / "child.yaml").startswith(f"{recipe}: rollout.group: ")


def test_a_key_given_twice_is_refused(recipe):
    recipe.write_text(recipe.read_text() + "run: {steps: 3}\n")
    assert "'run' is given twice" in refusal(recipe)
    (recipe.parent / "child.yaml").write_text("base: rl.yaml\n")
    line = recipe.read_text().count("\n")
    assert refusal(recipe.parent / "child.yaml").startswith(f"{recipe} is not valid YAML (line {line}: 'run' is given")


def test_no_number_is_read_in_another_base(recipe):
    """010 and 1:30 are text, as they are written: 8 and 90 to YAML 1.1."""
    loaded = load(recipe, ["run.name=010", "rollout.stop=[1:30, -0_7, 1:30.5, 0x10, 1_000, 10, 0]"])
    assert loaded.run.name == "010" and loaded.rollout.stop == ["1:30", "-0_7", "1:30.5", 16, 1000, 10, 0]
    assert load(recipe, [f"run.name={yaml.safe_dump('010')}"]).run.name == "010"
    (recipe.parent / "dumped.yaml").write_text(dump(loaded))
    assert load(recipe.parent / "dumped.yaml") == loaded
    assert "rollout.group_size: '010' is not a whole number" in refusal(recipe, "rollout.group_size=010")


def test_unreadable_recipes(tmp_path):
    assert "No such file" in refusal(tmp_path / "none.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n")
    assert "is not a recipe" in refusal(tmp_path / "list.yaml")
    (tmp_path / "broken.yaml").write_text("run: {steps: 3\n")
    assert "line 2" in refusal(tmp_path / "broken.yaml")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("run: {steps: 3", "is not valid YAML (line 2: expected ',' or '}'"),
        ("run: &run {name: *run}", ": an alias (*name) stands within its own value"),
        ("run: " + "[" * 100_000, ": its values are nested more deeply"),
        ("run: {steps: 3}\nseed: " + "9" * 6000, "is not valid YAML (line 2: Exceeds the limit"),
        ("run: 2024-13-01", "is not valid YAML (line 1: month must be in 1..12)"),
        ("run:\n  name: a\0", "is not valid YAML (line 2: the character '\\x00' is not allowed)"),
    ],
)
def test_broken_yaml_is_named_with_file_and_line(tmp_path, text, problem):
    (tmp_path / "broken.yaml").write_text(text + "\n")
    (tmp_path / "child.yaml").write_text("base: broken.yaml\n")
    told = refusal(tmp_path / "child.yaml")
    assert str(tmp_path / "broken.yaml") in told and problem in told and "\n" not in told


class TestPassthrough:
    def test_reaches_the_right_class(self, recipe):
        megatron = load(recipe, ["megatron.overlap_grad_reduce=true", "megatron.moe_router_dtype=fp32"]).megatron
        assert fields_of(DistributedDataParallelConfig, megatron) == {"overlap_grad_reduce": True}
        assert fields_of(TransformerConfig, megatron) == {"moe_router_dtype": "fp32"}

    def test_fields_read_from_source_are_megatrons(self):
        import dataclasses

        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig
        from megatron.core.transformer import TransformerConfig

        sections = {"megatron": (TransformerConfig, DistributedDataParallelConfig), "optimizer": (OptimizerConfig,)}
        for section, classes in sections.items():
            public = {f.name for cls in classes for f in dataclasses.fields(cls) if not f.name.startswith("_")}
            assert set(fields(section)) == public

    def test_every_refusal_names_something_that_exists(self):
        from fnmatch import fnmatch

        for section in SOURCES:
            for pattern in (pattern for patterns in refused()[section].values() for pattern in patterns.split()):
                assert any(fnmatch(name, pattern) for name in fields(section)), pattern

    def test_typed_options_are_not_refused(self):
        for section, model in (("megatron", config.Megatron), ("optimizer", config.Optimizer)):
            assert not [name for name in model.model_fields if reason_to_refuse(section, name)]


class TestPlan:
    def test_shared_prompts(self, recipe):
        """A prompt of up to 512 tokens and 8 responses of up to 128, and a group that is split."""
        sizes = ["data.max_prompt_tokens=512", "rollout.group_size=8", "rollout.max_response_tokens=128"]

        def line(*overrides: str, ranks: int = 1) -> str:
            plan = check(load(recipe, [*sizes, *overrides]), ranks)
            return next(line for line in plan.lines if line.startswith("shared prompts: "))

        assert line() == "shared prompts: on; a group has up to 512 + 8 x 128 = 1536 tokens instead of 5120"
        assert "and is cut where they do not fit" in line("batching.micro_batch_tokens=1024")
        assert "off, batching.share_prompts is off" in line("batching.share_prompts=off")
        assert "off, batching.pack_sequences is false" in line("batching.pack_sequences=false")
        assert "off, context parallelism" in line("megatron.context_parallel_size=2", ranks=2)

    def test_arithmetic(self, recipe):
        plan = check(load(recipe, ["algorithm.mini_batch_prompts=8", "algorithm.epochs=2"]), 2)
        assert "global batch: 256 responses = 32 prompts x 8" in plan.lines
        assert "layout: TP 1 x PP 1 x CP 1 x DP 2 = 2 ranks" in plan.lines
        assert "updates: 8 optimizer steps = 4 x 8 prompts x 2 epochs" in plan.lines and plan.layout.dp == 2
        assert "algorithm: name grpo, mini_batch_prompts 8, epochs 2" in plan.lines
        assert "algorithm: name grpo" in check(load(recipe, ["algorithm={}"])).lines
        assert any(line.startswith("schedule: 80 optimizer steps in 10 steps") for line in plan.lines)

    @pytest.mark.parametrize(
        "override, words",
        [
            ("model.precision=fp8", "model.precision: fp8 needs Transformer Engine"),
            ("tracking.wandb={}", "tracking.wandb: wandb is not installed: pip install"),
        ],
    )
    def test_a_package_that_is_missing(self, recipe, monkeypatch, override, words):
        monkeypatch.setattr(checks, "find_spec", lambda name: name == "psutil" or None)
        monkeypatch.setattr(checks.device, "has_transformer_engine", lambda: False)
        with pytest.raises(ConfigError, match=re.escape(words)):
            check(load(recipe, [override]))

    @pytest.mark.parametrize(
        "override, world_size, words",
        [
            ("megatron.tensor_model_parallel_size=4", 6, "6 ranks are not a multiple of TP 4 x PP 1 x CP 1 = 4"),
            ("megatron.tensor_model_parallel_size=3", 3, "4 attention heads do not divide by TP 3"),
            ("megatron.pipeline_model_parallel_size=3", 3, "4 layers do not divide by PP 3"),
            ("megatron.expert_model_parallel_size=2", 2, "the model has no experts"),
            ("megatron.sequence_parallel=true", 1, "does nothing with tensor_model_parallel_size 1"),
            ("megatron.virtual_pipeline_model_parallel_size=2", 1, "needs pipeline_model_parallel_size of 2"),
            ("rollout.group_size=1", 1, "takes 2 or more, not 1"),
            (
                "algorithm.mini_batch_prompts=5",
                1,
                "5 does not divide rollout.prompts_per_step, 32. Possible: 1, 2, 4, 8, 16, 32",
            ),
            ("rollout.max_response_tokens=4000", 1, "4512 tokens (data.max_prompt_tokens 512 + rollout"),
            ("rollout.max_response_tokens=1600", 1, "2112 tokens is beyond the model's max_position_embeddings, 2048"),
            ("batching.forward_only_tokens=100", 1, "100 does not hold a sequence of 1024"),
            ("optimizer.lr_warmup_steps=11", 1, "11 is beyond the run's optimizer steps, 10"),
            ("data.train=/none/such.jsonl", 1, "data.train: there is no such file"),
            ("model.path=/none/model", 1, "there is no such model folder"),
            ("model.path=no/such/model", 1, f"no such model folder, {Path.cwd()}/no/such/model."),
            ("model.tokenizer=/none/model", 1, "model.tokenizer: there is no such"),
            ("model.vision=trained", 1, "has no vision tower to train: leave it out"),
        ],
    )
    def test_refused(self, recipe, override, world_size, words):
        assert words in refusal(recipe, override, world_size=world_size)

    def test_the_possible_layouts_are_listed(self, recipe):
        told = refusal(recipe, "megatron.pipeline_model_parallel_size=3", world_size=2)
        layouts = ["TP 1 x PP 1 x CP 1 x DP 2", "TP 2 x PP 1 x CP 1 x DP 1", "TP 1 x PP 2 x CP 1 x DP 1"]
        assert told.endswith("\n  ".join(["can have", *layouts, "TP 1 x PP 1 x CP 2 x DP 1"]))

    @pytest.mark.parametrize("option", ["model.precision=fp8", "megatron.attention_backend=flash"])
    def test_what_transformer_engine_alone_can_do(self, recipe, option, monkeypatch):
        monkeypatch.setattr(checks.device, "has_transformer_engine", lambda: False)
        assert "Transformer Engine" in refusal(recipe, option, world_size=1)

    def test_architecture(self, recipe):
        shape = SHAPE | {"architectures": ["MambaForCausalLM"], "model_type": "mamba"}
        (recipe.parent / "model" / "config.json").write_text(json.dumps(shape))
        words = "config.json: model_type 'mamba' is not supported (architectures: MambaForCausalLM). Supported: qwen2"
        assert words in refusal(recipe, world_size=1)

    def test_as_many_kinds_of_layers_as_layers(self, recipe):
        shape = SHAPE | {"layer_types": ["full_attention"] * (SHAPE["num_hidden_layers"] + 1)}
        (recipe.parent / "model" / "config.json").write_text(json.dumps(shape))
        told = refusal(recipe, world_size=1)
        assert told.startswith("model.path: ") and "layer_types for num_hidden_layers" in told

    def test_weights_are_needed_unless_random(self, recipe):
        (recipe.parent / "model" / "model.safetensors").unlink()
        assert "model.initialise=random" in refusal(recipe, world_size=1)
        check(load(recipe, ["model.initialise=random"]))

    @pytest.mark.parametrize("option", ["model.path", "model.reference", "teacher"])
    def test_weights_of_another_model_are_refused_before_a_run(self, recipe, option):
        llama, model = SHAPE | {"architectures": ["LlamaForCausalLM"]}, recipe.parent / "other"
        given = {"model.reference": ["algorithm.kl_coefficient=0.1"], "teacher": ["distil.coefficient=1"]}
        name = {"teacher": "distil.teacher"}.get(option, option)
        overrides = [f"{name}={model}", *given.get(option, [])]
        for content, tensors, problem in (
            (SHAPE, llama, "8 missing: model.layers.0.self_attn.q_norm.weight, model.layers.0.self_attn.k_norm.weight"),
            (llama, SHAPE, "8 unexpected: model.layers.0.self_attn.k_norm.weight in model.safetensors, "),
            (SHAPE, SHAPE | {"intermediate_size": 256}, "mlp.gate_proj.weight (256, 128), config.json says (384, 128)"),
        ):
            write_model(model, content, tensors)
            told = refusal(recipe, *overrides, world_size=1)
            assert told.startswith(f"{option}: {model}/config.json: {model}: the tensors are not those"), told
            assert problem in told and "; config.json and tensors must be of one model" in told, told
        if option == "model.path":
            check(load(recipe, [*overrides, "model.initialise=random"]))
            (model / "model.safetensors.index.json").write_text('{"weight_map": {"a": "1.safetensors"}}')
            assert "names files that are not there: 1.safetensors" in refusal(recipe, *overrides, world_size=1)
        else:
            (model / "model.safetensors").unlink()  # its config.json is enough to plan
            check(load(recipe, overrides))

    def test_a_config_that_does_not_say_whether_there_is_an_output_matrix(self, recipe):
        for tied in (True, False):
            write_model(recipe.parent / "model", SHAPE, SHAPE | {"tie_word_embeddings": tied})
            check(load(recipe))

    def test_a_hub_name_is_not_checked_but_said(self, recipe, monkeypatch, tmp_path):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        assert "from the Hugging Face hub" in check(load(recipe, ["model.path=Qwen/Qwen3-0.6B"])).lines[0]


@given(st.integers(1, 32), st.integers(1, 8), st.integers(1, 8))
@settings(max_examples=60)
def test_possible_layouts_have_no_problems_and_miss_none(world, heads_per_group, groups):
    shape = ModelShape(json_of(4, 64, heads_per_group * groups, groups, 256, 128, 64))
    found = set(possible(world, shape))
    assert Layout(world, 1, 1, 1, 1, 1) in found
    for tp in range(1, world + 1):
        one = Layout(world, tp, 1, 1, 1, tp)
        assert (one in found) == (not list(problems(one, shape)))


@pytest.mark.parametrize("tp, fits", [(1, True), (2, False), (3, True), (6, True), (4, False)])
def test_kv_heads_divide_or_are_divided(tp, fits):
    """12 heads in 3 groups: TP 2 would cut a group in half; TP 6 gives every rank a copy of one."""
    shape = ModelShape(json_of(4, 64, 12, 3, 96, 128, 64))
    assert (not list(problems(Layout(tp, tp, 1, 1, 1, tp), shape))) == fits


class TestDifference:
    def test_options_that_may_change_on_resume(self, recipe):
        free = [
            "run.steps=20",
            "tracking.sampled_steps=2",
            "megatron.tensor_model_parallel_size=2",
            "batching.micro_batch_tokens=2048",
            "evaluation.samples=4",
            "rollout.offload_trainer=true",
            "vllm.tensor_parallel_size=2",
            "vllm.gpu_memory_utilization=0.4",
        ]
        assert difference(load(recipe), load(recipe, free)) == []

    def test_options_that_may_not_change_on_resume(self, recipe):
        changed = ["run.seed=1", "pipo.window=4", "optimizer.use_distributed_optimizer=false"]
        lines = difference(load(recipe), load(recipe, changed))
        assert "run.seed: 0 there, 1 now" in lines and "pipo.window: null there, 4 now" in lines
        assert "optimizer.use_distributed_optimizer: true there, false now" in lines  # its checkpoints are others

    @pytest.mark.parametrize(
        "option, changed",
        [
            ("megatron.moe_router_bias_update_rate", "0.0 there, 0.001 now"),
            ("megatron.grad_reduce_in_fp32", "null there, false now"),
            ("megatron.fp8_recipe", "null there, 'mxfp8' now"),
        ],
    )
    def test_what_changes_the_numbers_or_the_checkpoint_stays_on_resume(self, recipe, option, changed):
        begun = ["model.precision=fp8", "optimizer.use_precision_aware_optimizer=true"]
        now = changed.removesuffix(" now").rpartition(" ")[2]
        assert difference(load(recipe, begun), load(recipe, [*begun, f"{option}={now}"])) == [f"{option}: {changed}"]

    def test_an_optimizer_on_the_host_has_other_checkpoints(self, recipe):
        begun = ["optimizer.use_precision_aware_optimizer=true"]
        now = [*begun, "optimizer.optimizer_cpu_offload=true", "optimizer.optimizer_offload_fraction=1.0"]
        assert "optimizer.optimizer_cpu_offload: null there, true now" in difference(
            load(recipe, begun), load(recipe, now)
        )

    def test_a_longer_run_may_not_change_the_schedule(self, recipe):
        cosine = ["optimizer.lr_decay_style=cosine"]
        assert difference(load(recipe, cosine), load(recipe, [*cosine, "run.steps=20"]))[0].startswith(
            "run.steps: 10 there"
        )
        fixed = [*cosine, "optimizer.lr_decay_steps=10"]
        assert difference(load(recipe, fixed), load(recipe, [*fixed, "run.steps=20"])) == []


def test_data_errors_are_user_errors():
    assert issubclass(DataError, UserError)


@pytest.mark.parametrize(
    "overrides, words",
    [
        (["trainer=stf"], "trainer: 'stf' is not one of rl, sft, offline, generate. Did you mean 'sft'?"),
        (
            ["trainer=sft", "rollout.group_size=4"],
            "group_size: does nothing with trainer sft, only with rl, gen",
        ),
        (
            ["trainer=sft", "pipo.window=4"],
            "pipo: does nothing with trainer sft, only with rl: leave it",
        ),
        (["evaluation.patience=2"], "evaluation.patience: does nothing with trainer rl, only with offline: leave it"),
        (["trainer=sft", "rollout.temperatur=1"], "Did you mean 'temperature', of rl, generate?"),
        (["reward.tag=[a]"], "reward.tag: there is no such option with kind math. Did you mean 'tags', of format?"),
        (["reward.answr=any"], "reward.answr: there is no such option. Did you mean 'answer'?"),
        (
            ["reward={kind: sum, parts: [{kind: choice, rules: exact}]}"],
            "reward.parts.0.rules: does nothing with",
        ),
        (["reward=3"], "reward: 3 is not a section of options"),
        (["reward.kind=3"], "reward.kind: 3 is not one of math, code,"),
        (["constraint.eta=0.1"], "constraint.kind: is required: one of none, static, dynamic"),
        (
            ["constraint={kind: none, etta: 0.1}"],
            "with kind none. Did you mean 'eta', of static, dynamic?",
        ),
    ],
)
def test_an_option_of_another_trainer_or_kind_is_named_with_it(recipe, overrides, words):
    assert words in refusal(recipe, *overrides)


def test_a_home_folder_is_replaced_in_all_paths(recipe, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    changes = ["run.output_dir=~/run", "model.path=~/m", "data.test=~/rows.jsonl", "model.tokenizer=~/t"]
    home = load(recipe, changes)
    paths = (home.run.output_dir, home.model.path, home.data.test.path, home.model.tokenizer)
    assert paths == ("/home/me/run", "/home/me/m", "/home/me/rows.jsonl", "/home/me/t")


def test_what_a_run_wrote_is_read(recipe, tmp_path):
    now = load(recipe, ["constraint={kind: static, eta: 0.1}"])
    content = yaml.safe_load(dump(now))
    (tmp_path / "saved.yaml").write_text(yaml.safe_dump(content))
    assert config.load_saved(tmp_path / "saved.yaml") == now
    content["constraint"]["etta"] = 0.1
    (tmp_path / "saved.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError, match=r"saved.yaml: constraint.etta: there is no such option. Did you mean 'eta'"):
        config.load_saved(tmp_path / "saved.yaml")


BASE = "algorithm: {name: grpo, kl_coefficient: 0.01, epochs: 1}\nreward: {kind: math, answer: boxed}\n"


def test_options_of_a_base_go_with_its_algorithm(recipe, tmp_path, capsys):
    """Those that the chosen algorithm or kind has stay. What the same layer gives is refused."""
    (tmp_path / "base.yaml").write_text(BASE)
    path = tmp_path / "mine.yaml"
    path.write_text(f"base: [{recipe}, base.yaml]\n")
    assert load(path).algorithm.kl_coefficient == 0.01
    capsys.readouterr()
    loaded = load(path, ["algorithm={name: sdpo}", "reward.kind=choice"])
    assert (loaded.algorithm.name, loaded.reward.kind) == ("sdpo", "choice")
    lines = sorted(capsys.readouterr().err.splitlines())
    where = f"of {tmp_path}/base.yaml"
    assert f"left out, as algorithm sdpo of the command line lacks them: algorithm.kl_coefficient {where}" in lines[0]
    assert lines[1] == f"left out, as kind choice of the command line lacks them: reward.answer {where}"
    with pytest.raises(ConfigError, match="algorithm.kl_coefficient: does nothing with algorithm sdpo"):
        load(path, ["algorithm={name: sdpo}", "algorithm.kl_coefficient=0.1"])
    with pytest.raises(ConfigError, match="algorithm.kl_coefficent"):
        (tmp_path / "base.yaml").write_text(BASE.replace("kl_coefficient", "kl_coefficent"))
        load(path, ["algorithm={name: sdpo}"])


def test_a_loaded_recipe_takes_options_as_its_file_does(recipe, capsys):
    """Another constraint sets the KL anew, and options that another algorithm or engine lacks go."""
    for content in ({"kind": "none"}, {"kind": "static", "eta": 0.5, "mode": "reward"}):
        loaded = load(recipe, constraint=content)
        for constraint in (None, {"kind": "none"}, {"kind": "static", "eta": 0.1, "mode": "loss"}):
            found = load(loaded, constraint=constraint).algorithm
            assert found == load(recipe, constraint=constraint).algorithm and load(loaded) == loaded
    given = load(recipe, ["algorithm.kl_coefficient=0.3", "constraint={kind: dynamic, eta: 0.1, template: code}"])
    assert load(given).algorithm.kl_coefficient == load(given, constraint=None).algorithm.kl_coefficient == 0.3
    first = load(recipe, ["algorithm.kl_coefficient=0.1", "vllm.max_model_len=2048"])
    capsys.readouterr()
    other = load(first, algorithm={"name": "distil", "teacher": "org/teacher"}, rollout={"engine": "hf"})
    assert other.algorithm.name == "distil" and not other.vllm.model_fields_set
    told = capsys.readouterr().err
    assert "algorithm distil of the call lacks them: algorithm.kl_coefficient" in told and "vllm.max_model_len" in told
    with pytest.raises(ConfigError, match="algorithm.kl_coefficient: does nothing with algorithm distil"):
        load(recipe, algorithm={"name": "distil", "teacher": "org/teacher", "kl_coefficient": 0.1})
