"""The leaderboard of function calls: its rows, and its rules."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from examples.pipo.bfcl import bfcl, rows_of
from megatron_rft.config import load
from megatron_rft.config.rewards import OwnOptions
from megatron_rft.records import Prompt
from megatron_rft.utils.errors import DataError

FOLDER = Path(os.environ.get("MEGATRON_RFT_DATA", Path(__file__).parents[4] / "shared" / "data")) / "bfcl"
FUNCTION = {
    "name": "area.of",
    "parameters": {
        "type": "dict",
        "properties": {
            "base": {"type": "integer"}, "height": {"type": "float"}, "unit": {"type": "string"},
            "points": {"type": "array"}, "style": {"type": "dict"}, "exact": {"type": "boolean"},
            "at": {"type": "tuple"},
        },
        "required": ["base"],
    },
}  # fmt: skip
ACCEPTED = [
    {
        "area.of": {
            "base": [10],
            "height": [5.0],
            "unit": ["sq. cm", ""],
            "points": [[1, 2], ""],
            "style": [{"colour": ["red", "Blue"], "width": [1, ""]}, ""],
            "exact": [True, "Flag_a", ""],
            "at": [[1, 2], ""],
        }
    }
]


def reward(reference: list | str, text: str) -> float:
    return bfcl(Prompt(0, (1,), "", json.dumps(reference), {"function": [FUNCTION]}), text).reward


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("[area.of(base=10, height=5)]", True),  # a whole number is a float
        ("[area_of(base=10, height=5.0)]", True),
        ("[area.of(base=10.0, height=5)]", False),  # but no float an integer
        ("[area.of(base='10', height=5)]", False),
        ("[area.of(height=5)]", False),
        ("[area.of(base=10)]", False),
        ("[area.of(base=10, height=5, unit='SQ CM')]", True),
        ("[area.of(base=10, height=5, unit='m')]", False),
        ("[area.of(base=10, height=5, colour='m')]", False),
        ("[area.of(base=10, height=5, points=[1, 2])]", True),
        ("[area.of(base=10, height=5, points=[2, 1])]", False),
        ("[area.of(base=10, height=5, points=(1, 2))]", False),
        ("[area.of(base=10, height=5, at=(1, 2))]", True),
        ("[area.of(base=10, height=5, at=[1, 2])]", True),
        ("[area.of(base=10, height=5, style={'colour': 'blue'})]", True),
        ("[area.of(base=10, height=5, style={'width': 1})]", False),
        ("[area.of(base=10, height=5, exact=True)]", True),
        ("[area.of(base=10, height=5, exact=1)]", False),
        ("[area.of(base=10, height=5, exact='Flag_a')]", True),  # a variable, written as it is
        ("[area.of(base=10, height=5, exact='flag a')]", False),
        ("[area.of(base=10, height=5), area.of(base=10, height=5)]", False),
        ('[{"name": "area.of", "arguments": {"base": 10, "height": 5}}]', True),
        ("The area is 25.", False),
        ("[area.of(", False),
    ],
)
def test_the_leaderboards_rules(text, right):
    assert reward(ACCEPTED, text) == float(right)


def test_parallel_irrelevance_and_relevance():
    two = [{"area.of": {"base": [1]}}, {"area.of": {"base": [2]}}]
    assert reward(two, "[area.of(base=2), area.of(base=1)]") == 1.0
    assert reward(two, "[area.of(base=2), area.of(base=2)]") == 0.0
    assert reward([], "None of the functions fits.") == 1.0
    assert reward([], "[area.of(base=1)]") == reward([], "Try `area.of(base=1)`.") == 0.0
    assert reward([], "Neither `area.of()` nor another function fits.") == 1.0
    assert (
        reward([], '<tool_call>{"name": "area.of"') == reward([], '{"name": "area.of", "arguments": {"base": 1') == 0.0
    )
    assert reward([], "[area.of(") == 0.0
    assert reward([], '{"error": "no function fits"}') == 1.0  # JSON, and no call
    assert reward("any", "[volume.of(side=1)]") == 1.0
    assert reward("any", "None of the functions fits.") == reward("any", "[area.of(") == reward("any", "[]") == 0.0


@pytest.mark.parametrize("tools", ["{", [{"nme": "f"}], ["f"], [{"name": "f", "parameters": {"properties": []}}]])
def test_a_broken_row_is_an_error(tools):
    with pytest.raises(ValueError, match="its tools are no list of described functions"):
        bfcl(Prompt(3, (1,), "", '[{"f": {}}]', {"tools": tools}), "f()")
    with pytest.raises(ValueError, match="not a list of accepted calls"):
        bfcl(Prompt(3, (1,), "", "no JSON"), "f()")


def written(folder: Path, number: str, answers: dict, **changed: Any) -> list[dict]:
    question = [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Area?"}]]
    row = {"id": number, "question": question, "function": [{"name": "area", "parameters": {}}]} | changed
    (folder / "possible_answer").mkdir(exist_ok=True)
    (folder / "BFCL_v4_x.json").write_text(json.dumps(row) + "\n")  # lines, in a .json
    lines = "\n".join(json.dumps({"id": key, "ground_truth": value}) for key, value in answers.items())
    (folder / "possible_answer" / "BFCL_v4_x.json").write_text(lines)
    return list(rows_of(folder))


def test_answers_are_joined_by_id(tmp_path):
    right = [{"area": {"side": [2], "unit": ["", "m"]}}]
    (row,) = written(tmp_path, "live_parallel_multiple_3-1-0", {"other": [], "live_parallel_multiple_3-1-0": right})
    assert json.loads(row["answer"]) == right and row["subject"] == "parallel_multiple"
    system, asked = row["question"]
    assert system["content"].startswith("Be brief.\n\nYou can call") and asked["content"] == "Area?"
    assert '"name": "area"' in system["content"] and row["function"][0]["name"] == "area"


@pytest.mark.parametrize(
    ("number", "category"),
    [
        ("irrelevance_0", "irrelevance"),
        ("live_relevance_1-0-0", "relevance"),
        ("simple_python_1", "simple"),
        ("multiple_7", "multiple"),
    ],
)
def test_categories(tmp_path, number, category):
    (row,) = written(tmp_path, number, {number: [{"area": {}}]})
    assert row["subject"] == category
    assert row["answer"] == {"irrelevance": "[]", "relevance": '"any"'}.get(category, '[{"area": {}}]')


def test_what_is_left_out_and_what_is_missing(tmp_path):
    with pytest.raises(DataError, match="no answer to simple_1 in .*possible_answer belongs beside"):
        written(tmp_path, "simple_1", {})
    assert written(tmp_path, "multiple_1", {}, question=[[], []]) == []
    for name in ("exec_simple", "simple_java", "javascript"):
        assert written(tmp_path, f"{name}_4", {}) == []


def first(accepted: Any) -> Any:
    """Arguments with the first accepted value of each."""
    if isinstance(accepted, dict):
        options = {key: value if isinstance(value, list) else [value] for key, value in accepted.items()}
        given = {key: [each for each in value if each != ""] for key, value in options.items()}
        return {key: first(value[0]) for key, value in given.items() if value}
    return [first(each) for each in accepted] if isinstance(accepted, list) else accepted


@pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no benchmark rows in {FOLDER} (MEGATRON_RFT_DATA)")
def test_real_rows(tmp_path):
    """The references are right, those of other rows wrong, and their names are those of the row's functions."""
    for file in FOLDER.rglob("BFCL_*.jsonl"):
        target = tmp_path / file.relative_to(FOLDER).with_suffix(".json")
        target.parent.mkdir(exist_ok=True)
        shutil.copy(file, target)
    rows = list(rows_of(tmp_path))
    assert len(rows) == 185  # of 200: ten of several turns, five in Java and JavaScript
    assert sum(row["answer"] == "[]" for row in rows) == sum(row["subject"] == "irrelevance" for row in rows) == 30
    assert sum(row["answer"] == '"any"' for row in rows) == 5
    right = [row for row in rows if row["subject"] not in ("irrelevance", "relevance")]
    prompts = [Prompt(0, (1,), "", row["answer"], row) for row in right]
    texts = []
    for row in right:
        calls = [each for call in json.loads(row["answer"]) for each in call.items()]
        assert {name for name, _ in calls} <= {function["name"] for function in row["function"]}
        texts.append(json.dumps([{"name": name, "arguments": first(accepted)} for name, accepted in calls]))
    assert [score.reason for score in map(bfcl, prompts, texts) if score.reward != 1.0] == []
    assert sum(score.reward for score in map(bfcl, prompts, texts[1:] + texts[:1])) == 0
    assert sum(bfcl(prompt, "I cannot do that.").reward for prompt in prompts) == 0


def test_the_recipe_grades_it_by_these_rules():
    benchmark = load("examples/pipo/tools/grpo.yaml", []).evaluation.benchmarks["bfcl"]
    assert isinstance(benchmark.reward, OwnOptions) and benchmark.reward.function == "examples/pipo/bfcl.py:bfcl"
