"""`megatron-rft evaluate` with an untrained model: benchmarks through their adapters, and resuming after a kill."""

import json
import shutil
import sys

import pytest

from megatron_rft.__main__ import main
from megatron_rft.commands import evaluate as standalone
from megatron_rft.commands import main as cli
from megatron_rft.config import load
from megatron_rft.config.environment import Program
from megatron_rft.config.evaluation import Benchmark
from megatron_rft.training.evaluator import Evaluator
from megatron_rft.training.problems import Problems
from megatron_rft.utils import device


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from transformers import AutoConfig, AutoModelForCausalLM

    from examples.quickstart.arithmetic import write_model_folder

    folder = write_model_folder(tmp_path_factory.mktemp("model"), num_hidden_layers=1)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    return folder


@pytest.fixture
def recipe(tmp_path, model):
    rows = [
        {
            "problem": f"{i}+1?",
            "answer": str(i + 1),
            "level": 1 + i % 2,
            "subject": "sums",
            "solution": "",
            "unique_id": i,
        }
        for i in range(5)
    ]
    rows.append(rows[0] | {"problem": "long " * 50})
    (tmp_path / "math500.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"run: {{output_dir: {tmp_path}/run, steps: 1}}\nmodel: {{path: {model}}}\n"
        "data: {train: examples/quickstart/arithmetic.py:rows, max_prompt_tokens: 100}\n"
        "rollout: {engine: hf, max_response_tokens: 4}\n"
        "evaluation:\n  samples: 2\n  batch: 2\n  benchmarks:\n"
        f"    first: {{path: {tmp_path}/math500.jsonl, adapter: math500, samples: 3}}\n"
        "    second: {path: examples/quickstart/arithmetic.py:rows, limit: 3}\n"
    )
    return path


def evaluate(recipe, model, capsys, *overrides) -> str:
    assert cli.main(["evaluate", str(recipe), "--model", str(model), *overrides]) == 0
    return capsys.readouterr().out


def test_benchmarks_with_their_own_samples(recipe, model, capsys, tmp_path):
    told = evaluate(recipe, model, capsys)
    assert "| first | 5 | 3 |" in told and "| second | 3 | 2 |" in told and "| 1 prompt too long |" in told
    (folder,) = (tmp_path / "run" / "evaluation").iterdir()
    assert sorted(file.name for file in folder.iterdir()) == [
        "conditions.json",
        "first.jsonl",
        "results.json",
        "results.md",
        "second.jsonl",
    ]
    prompt = json.loads((folder / "first.jsonl").read_text().splitlines()[0])["prompt"]
    assert prompt == "0+1? Let's think step by step and output the final answer within \\boxed{}."


@pytest.mark.parametrize("retrained", [False, True])
def test_a_killed_evaluation_asks_only_what_is_left(recipe, model, capsys, tmp_path, monkeypatch, retrained):
    told = evaluate(recipe, model, capsys)
    assert told.startswith("first: 2 of 5 problems are answered\nfirst: 4 of 5") and "second: 3 of 3" in told
    whole = told[told.index("| benchmark") :]
    (folder,) = (tmp_path / "run" / "evaluation").iterdir()
    results = (folder / "results.json").read_text()
    shutil.rmtree(folder)
    measure = Evaluator.measure

    def killed(self, part, *more):
        if part == "second":
            raise KeyboardInterrupt
        return measure(self, part, *more)

    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "measure", killed)
        assert main(["evaluate", str(recipe), "--model", str(model)]) == 130
    assert not (folder / "results.json").exists() and "already" not in capsys.readouterr().out
    if retrained:
        (model / "model.safetensors").touch()
    told = evaluate(recipe, model, capsys)
    assert ("first: 5 of 5 problems are answered already" in told) is not retrained
    assert told.endswith(whole) and (folder / "results.json").read_text() == results


def test_a_finished_evaluation_is_not_repeated_and_other_benchmarks_stay(recipe, model, capsys, tmp_path, monkeypatch):
    evaluate(recipe, model, capsys)
    (folder,) = (tmp_path / "run" / "evaluation").iterdir()
    before = {file.name: file.read_text() for file in folder.iterdir()}
    with monkeypatch.context() as patch:  # no engine is built
        patch.setattr(standalone, "build_engine", None)
        evaluate(recipe, model, capsys)
        assert {file.name: file.read_text() for file in folder.iterdir()} == before
        evaluate(recipe, model, capsys, "evaluation.benchmarks.first=null")
    names = [each["name"] for each in json.loads((folder / "results.json").read_text())]
    assert names == ["second", "first"]
    assert json.loads((folder / "results.json").read_text())[::-1] == json.loads(before["results.json"])
    told = evaluate(recipe, model, capsys, "evaluation.benchmarks.first.samples=1")  # asked anew
    assert "| first | 5 | 1 |" in told and "first: 5 of 5 problems are answered already" not in told
    (model / "model.safetensors").touch()  # another model: nothing of the old one's results stays
    evaluate(recipe, model, capsys, "evaluation.benchmarks.first=null")
    assert [each["name"] for each in json.loads((folder / "results.json").read_text())] == ["second"]


def test_changed_code_of_the_users_reward_grades_anew(recipe, model, capsys, tmp_path):
    code = tmp_path / "mine.py"
    own = f"reward={{kind: own, function: '{code}:grade'}}"
    for reward in (0.25, 0.75):
        code.write_text(f"def grade(prompt, text):\n    return {reward}\n")
        sys.modules.pop(f"user:{code}", None)
        assert f"| second | 3 | 2 | {reward:.3f}" in evaluate(recipe, model, capsys, own)


def test_changed_code_of_a_program_is_asked_anew(tmp_path):
    script = tmp_path / "my_agent.py"
    options = Program(kind="program", command=["python", str(script), "a.b: no file" * 500], score="grade.py:grade")
    found = []
    for content in ("1", "2"):
        script.write_text(content)
        found.append(standalone.digests(options.code))
    assert [*found[0]] == [*found[1]] == [str(script)] and found[0] != found[1]


def test_samples_are_a_benchmarks_own(recipe):
    evaluator = Evaluator(load(recipe).evaluation, None, None, {})
    assert (evaluator.samples("first"), evaluator.samples("second")) == (3, 2)


def test_the_recipes_template_is_for_mathematics(recipe):
    overrides = [
        "data.prompt_template=fpa",
        "evaluation.benchmarks.third={path: x.jsonl, adapter: humaneval}",
        "evaluation.benchmarks.fourth={path: x.jsonl, adapter: apps, prompt_template: '{question}!'}",
    ]
    loaded = load(recipe, overrides)
    problems = Problems(loaded.data, benchmarks=loaded.evaluation.benchmarks)
    templates = [problems.prompt_format(part).prompt_template for part in loaded.evaluation.benchmarks]
    assert templates == ["fpa", "fpa", None, "{question}!"]


def test_a_benchmark_has_the_reward_that_its_adapter_asks_for(recipe):
    loaded = load(recipe, ["reward.answer=any"])
    other = load(recipe, ["evaluation.benchmarks.own={path: x.jsonl, reward: {kind: choice}}"]).evaluation.benchmarks
    assert standalone.reward_of(loaded.reward, other["own"]).kind == "choice"
    for benchmark in (Benchmark(path="x.jsonl", adapter="math500"), Benchmark(path="x.jsonl")):
        assert standalone.reward_of(loaded.reward, benchmark) == loaded.reward
    assert standalone.reward_of(loaded.reward, Benchmark(path="x.jsonl", adapter="rlla")).kind == "tool"


def test_what_is_wrong_with_the_last_benchmark_shows_before_the_first(recipe, model, capsys, tmp_path):
    (tmp_path / "none.jsonl").write_text('{"question": "?"}\n')
    broken = f"evaluation.benchmarks.second.path={tmp_path}/none.jsonl"
    assert cli.main(["evaluate", str(recipe), "--model", str(model), broken]) == 2
    told = capsys.readouterr().err
    assert f"evaluation.benchmarks.second: {tmp_path}/none.jsonl:1 has no field 'answer'" in told
    assert not (tmp_path / "run").exists()


def test_a_recipe_of_many_ranks_is_evaluated_in_one_process(recipe, model, capsys, monkeypatch):
    monkeypatch.setattr(device, "gpu_gib", lambda: 1e-6)  # no room to train in
    layout = "megatron={tensor_model_parallel_size: 2, sequence_parallel: true}"
    assert "| second | 3 | 2 |" in evaluate(recipe, model, capsys, layout)
    assert cli.main(["evaluate", str(recipe), "--model", str(model), layout, "vllm.tensor_parallel_size=2"]) == 2
    assert "has one process on one device. Set it to 1" in capsys.readouterr().err


def test_nothing_to_evaluate(recipe, model, capsys):
    command = ["evaluate", str(recipe), "--model", str(model), "evaluation.benchmarks=null"]
    assert cli.main(command) == 2
    assert "nothing to evaluate on" in capsys.readouterr().err
