"""The ways to name data in a recipe: adapter, file, folder or hub name; checked without network and torch."""

import json

import pytest

from megatron_rft.config import dump, load
from megatron_rft.plan import check
from megatron_rft.utils.errors import UserError

SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "max_position_embeddings": 4096,
    "vocab_size": 256,
}


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(SHAPE))
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "train-0.jsonl").write_text("{}\n")
    path = tmp_path / "rl.yaml"
    model = f"model: {{path: {tmp_path}/model, initialise: random}}"
    path.write_text(
        f"run: {{output_dir: {tmp_path}/out, steps: 10}}\n{model}\n"
        "data: {train: examples/quickstart/arithmetic.py:rows}\n"
    )
    return path


def train(recipe, source: str):
    return load(recipe, [f"data.train={source}"]).data.train


def test_an_adapters_name_is_its_data_set_on_the_hub(recipe):
    source = train(recipe, "gsm8k")
    assert (source.path, source.adapter, source.subset, source.split) == ("hub:openai/gsm8k", "gsm8k", "main", None)
    assert source == train(recipe, "{path: gsm8k}") == train(recipe, "{adapter: gsm8k}")
    assert train(recipe, "{adapter: gsm8k, subset: socratic}").subset == "socratic"
    assert train(recipe, "{adapter: gsm8k, path: mine.jsonl}").path == "mine.jsonl"
    assert train(recipe, "{path: livecodebench, files: test6.jsonl}").files == "test6.jsonl"


def test_a_resolved_recipe_loads_to_the_same(recipe, tmp_path):
    loaded = load(recipe, ["data.train=gsm8k", "data.test={path: math, split: test}", "data.prompt_template=fpa"])
    (tmp_path / "dumped.yaml").write_text(dump(loaded))
    assert load(tmp_path / "dumped.yaml") == loaded


def test_a_plan_says_what_it_reads_and_what_it_has_not_checked(recipe, tmp_path):
    overrides = ["data.train=math", "data.validation=hub:org/name@v1", f"data.test={tmp_path}/shards"]
    lines = check(load(recipe, overrides)).lines
    assert "data.train: EleutherAI/hendrycks_math (math), from the Hugging Face hub: not checked yet" in lines
    assert "data.validation: org/name@v1, from the Hugging Face hub: not checked yet" in lines
    assert f"data.test: {tmp_path}/shards" in lines


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "data.train={path: a.jsonl, adapter: maths}",
            "train.adapter: there is no adapter 'maths'. Did you mean 'math'",
        ),
        (
            "data.train={path: examples/quickstart/arithmetic.py:rows, adapter: math}",
            "adapter: does nothing with a function, which returns rows with our fields",
        ),
        (
            "data.train={path: math, answer_field: x}",
            "answer_field: does nothing with an adapter: math knows its fields",
        ),
        ("data.train=math_perturb", "the Hugging Face hub does not have math_perturb in this form: give"),
        ("data.train=hub:math", "'hub:math' is no hub name, hub:organisation/name"),
        ("data.chat_template_kwargs={enable_thinking: false}", "chat_template_kwargs: does nothing without chat: true"),
        (
            "data={train: a.jsonl, chat: true, chat_template_kwargs: {tools: x}}",
            "chat_template_kwargs.tools: is set by",
        ),
        ("data.train={path: a.jsonl, files: b}", "files: does nothing for a file"),
        ("data.train={path: a.parquet, subset: b}", "subset: does nothing for a file"),
        ("data.train={path: d, files: '*.jsonl', split: dev}", "split: does nothing together with files"),
        ("data.train={path: d, files: '*.jsonl', split: train}", "split: does nothing together with files"),
        ("data.train={path: d, split: 'train[:80'}", "'train[:80' is no split; a slice is train[:80%]"),
        ("data.train={path: d, split: 'train[10%:50]'}", "is no split"),  # datasets would read 50%
        ("data.train={path: a.jsonl, split: 'test[:80%]'}", "split: does nothing for a file"),
        ("data.train={path: a.jsonl, streaming: true, limit: 3}", "streaming: does nothing of data that is here"),
        (
            "data.train={path: 'hub:a/b', streaming: true}",
            "streaming: reads the first rows: give their number by limit",
        ),
        ("data.train={path: 'hub:a/b', streaming: true, limit: 3, split: 'train[:9]'}", "and no slice of a split"),
        ("data.train={path: a.py:rows, files: b}", "files: does nothing for a file"),
        ("data.prompt_template=fap", "'fap' has no {field} and is not a template's name. Did you mean 'fpa'"),
    ],
)
def test_what_cannot_be_is_refused(recipe, override, message):
    with pytest.raises(UserError) as error:
        load(recipe, [override])
    assert message in str(error.value)


def test_benchmarks(recipe):
    overrides = ["evaluation.benchmarks.amc={path: amc23, samples: 32}", "evaluation.benchmarks.he=humaneval"]
    loaded = load(recipe, overrides)
    assert loaded.evaluation.benchmarks["amc"].samples == 32
    assert any(
        line.startswith("evaluation.benchmarks.he: openai/openai_humaneval (humaneval)") for line in check(loaded).lines
    )
    for override, message in (
        ("data.test={path: math500, samples: 2}", "data.test.samples: is for evaluation.benchmarks"),
        ("evaluation.benchmarks.test=math500", "benchmarks.test: cannot name a benchmark"),
        (
            "evaluation.benchmarks.a={path: math500, limt: 3}",
            "benchmarks.a.limt: there is no such option. Did you mean 'limit'",
        ),
    ):
        with pytest.raises(UserError, match=message):
            load(recipe, [override])


def test_field_names_that_no_data_set_would_use(recipe):
    with pytest.raises(UserError, match="data.prompt_field: does nothing: every data set here has its own"):
        load(recipe, ["data.train=math", "data.prompt_field=problem"])
    load(recipe, ["data.train=math", "data.test=examples/quickstart/arithmetic.py:rows", "data.prompt_field=question"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.train=mth", "no such file or folder, mth. Did you mean 'math'"),
        ("data.train=org/name", "no such file or folder, org/name. On the Hugging Face hub. Write hub:org/name"),
        ("data.train={folder}/model", "model has no .parquet, .arrow, .jsonl, .*txt or \\(text\\) .gz file"),
        ("data.train={folder}/rl.xls", "rl.xls is not a .parquet, .arrow, .jsonl, .*txt or \\(text\\) .gz file"),
        ("data.train={folder}/rl.md", "rl.md is not a .parquet, .arrow, .jsonl, "),
        ("data.train=apps", "data.train: apps is graded by reward.kind=code, not math"),
    ],
)
def test_what_is_not_there(recipe, tmp_path, override, message):
    (tmp_path / "model" / "config.json").rename(tmp_path / "config.json")
    (tmp_path / "rl.md").touch()
    (tmp_path / "rl.xls").touch()
    with pytest.raises(UserError, match=message):
        check(load(recipe, [override.format(folder=tmp_path), f"model.path={tmp_path}"]))
