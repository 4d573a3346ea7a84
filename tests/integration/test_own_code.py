"""Runs the examples of docs/own_algorithm.md and docs/own_data_and_reward.md from a recipe, and makes a report of that
run."""

import json
import shutil

import pytest

from megatron_rft.commands import main
from tests.integration.test_kill_and_resume import killed
from tests.integration.tiny import ROOT, metrics, train, write_recipe
from tests.unit.test_docs import files_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    for page in ("own_algorithm.md", "own_data_and_reward.md"):
        files_of(ROOT / "docs" / page, folder)
    return folder


@pytest.fixture(scope="module")
def recipe(folder):
    """A recipe with absolute paths, so the test's working directory does not matter."""
    path = write_recipe(
        folder,
        run={"steps": 3},
        algorithm={
            "name": "own",
            "objective": f"{folder}/gentle.py:Gentle",
            "negative": 0.25,
            "kl_coefficient": 0.0,
            "mini_batch_prompts": None,
        },
        reward={"kind": "own", "function": f"{folder}/close.py:close", "maximum": 1.0},
        pipo={"window": 2, "learning_rate": 1e-2},
    )
    rows = [json.loads(line) | {"tolerance": 2} for line in (folder / "train.jsonl").read_text().splitlines()]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:4]))
    return path


def test_own_algorithm_and_reward_train(recipe, folder):
    status, output = train(recipe)
    assert status == 0, output[-3000:]
    lines = metrics(folder / "run")[1:]
    assert len(lines) == 3 and all(line["policy/skipped"] == 0 for line in lines)
    rewards = {sample["reward"] for line in samples(folder) for sample in line["samples"]}
    assert rewards & {0.0, 0.5, 1.0} and rewards <= {0.0, 0.5, 1.0}, "digits at a distance, tolerance 2"
    assert any(
        "is no number" in s["reason"] or "off by" in s["reason"] for line in samples(folder) for s in line["samples"]
    )
    negative = [v for line in samples(folder) for s in line["samples"] for v in s["values"]["advantages"] if v < 0]
    assert negative and min(negative) > -0.25 * 8**0.5  # the largest of a group of 8, a quarter of it


def samples(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "run/samples.jsonl").read_text().splitlines()]


def test_its_report(recipe, folder, capsys):
    assert main.main(["report", str(folder / "run")]) == 0
    page = (folder / "run/report/report.html").read_text()
    assert "<h2>run</h2>" in page and "gentle.py:Gentle" in page and "off by" in page


JUDGE = """
import asyncio, os, random

def draws(prompt, text):
    return random.random() * (prompt.answer in text)

async def asks(prompt, text):
    await asyncio.sleep(0.01)
    return float(prompt.answer in text)
"""


@pytest.mark.parametrize("name", ["draws", "asks"])
def test_kill_9_and_resume_with_an_own_reward(tmp_path, name):
    digests = []
    (tmp_path / "judge.py").write_text(JUDGE)
    for folder in ("whole", "killed"):
        run = {"steps": 4, "seed": 3, "output_dir": str(tmp_path / folder)}
        reward = {"kind": "own", "function": f"{tmp_path}/judge.py:{name}", "processes": 2}
        recipe = write_recipe(tmp_path, run=run, reward=reward, data={"test": None})
        if folder == "killed":
            killed(recipe, tmp_path / folder, step=2)
        status, output = train(recipe)
        assert status == 0 and ("resumed after step" in output) is (folder == "killed"), output[-3000:]
        digests.append((tmp_path / folder / "export/model.safetensors").read_bytes())
    assert digests[0] == digests[1]


def test_errors_in_user_code_are_reported_before_anything_starts(recipe, folder, tmp_path):
    shutil.copy(recipe, tmp_path / "recipe.yaml")
    for override, problem in (
        ("algorithm.negatve=1.0", "algorithm.negatve: there is no such option. Did you mean 'negative'?"),
        (f"algorithm.objective={folder}/gentle.py:Gentel", "has no Gentel. Did you mean 'Gentle'?"),
        (f"reward.function={folder}/closer.py:close", "there is no file"),
    ):
        status, output = train(tmp_path / "recipe.yaml", override, f"run.output_dir={tmp_path}/out")
        assert status == 2 and problem in output, output
        assert not (tmp_path / "out").exists() and "Traceback" not in output
