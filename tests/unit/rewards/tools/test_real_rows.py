"""References of real tool-use and multiple-choice rows get the full reward, those of other rows do not."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from megatron_rft.records import Prompt
from megatron_rft.rewards.choice import ChoiceReward
from megatron_rft.rewards.tools.calls import tool_calls
from megatron_rft.rewards.tools.verifier import ToolReward

FOLDER = Path(os.environ.get("MEGATRON_RFT_DATA", Path(__file__).parents[5] / "shared" / "data"))
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no benchmark rows in {FOLDER} (MEGATRON_RFT_DATA)")
CATEGORIES = (
    "simple_python", "multiple", "parallel", "parallel_multiple",
    "live_simple", "live_multiple", "live_parallel", "live_parallel_multiple",
)  # fmt: skip


def rows(name: str) -> list[dict]:
    path = FOLDER / name
    if not path.is_file():
        pytest.skip(f"no {path}")
    return [json.loads(line) for line in path.read_text().splitlines()]


def prompts(answers: list[str], fields: list[dict] | None = None) -> list[Prompt]:
    return [Prompt(i, (1,), "", answer, fields[i] if fields else {}) for i, answer in enumerate(answers)]


def test_rlla():
    references = [row["reward_model"]["ground_truth"] for row in rows("rlla_test.jsonl")]
    reward = ToolReward("rlla")
    assert {score.reward for score in reward(prompts(references), references)} == {4.0}
    calls = [text for text in references if tool_calls(text)]
    others = reward(prompts(calls), calls[1:] + calls[:1])
    assert not any(score.correct for score in others) and all(score.reward < 4.0 for score in others)


@pytest.mark.parametrize("level", [1, 2, 3])
def test_api_bank(level):
    answers = [json.dumps(row["answer"]) for row in rows(f"api_bank/level-{level}-api_processed.jsonl")]
    texts = [f"<tool_call>{answer}</tool_call>" for answer in answers]
    assert {score.reward for score in ToolReward("rlla")(prompts(answers), texts)} == {4.0}


def first(accepted: Any) -> Any:
    """Arguments with the first accepted value of each."""
    if isinstance(accepted, dict):
        options = {key: value if isinstance(value, list) else [value] for key, value in accepted.items()}
        given = {key: [each for each in value if each != ""] for key, value in options.items()}
        return {key: first(value[0]) for key, value in given.items() if value}
    return [first(each) for each in accepted] if isinstance(accepted, list) else accepted


@pytest.mark.parametrize("category", CATEGORIES)
def test_bfcl(category):
    problems = rows(f"bfcl/BFCL_v4_{category}.jsonl")
    answers = {row["id"]: row["ground_truth"] for row in rows(f"bfcl/possible_answer/BFCL_v4_{category}.jsonl")}
    references = [answers[row["id"]] for row in problems]
    asked = prompts([json.dumps(each) for each in references], [{"tools": row["function"]} for row in problems])
    texts = [
        json.dumps([{"name": name, "arguments": first(accepted)} for call in each for name, accepted in call.items()])
        for each in references
    ]
    reward = ToolReward("bfcl")
    assert [score.reason for score in reward(asked, texts) if score.reward != 1.0] == []
    assert sum(score.reward for score in reward(asked, texts[1:] + texts[:1])) == 0
    assert sum(score.reward for score in reward(asked, ["I cannot do that."] * len(asked))) == 0


def test_bfcl_irrelevance():
    asked = prompts(["[]"] * 2, [{"tools": row["function"]} for row in rows("bfcl/BFCL_v4_irrelevance.jsonl")[:2]])
    assert [score.reward for score in ToolReward("bfcl")(asked, ["None of them.", "[f(a=1)]"])] == [1.0, 0.0]


@pytest.mark.parametrize("subject", ["biology", "chemistry", "material", "physics"])
def test_sciknoweval(subject):
    answers = [row["answer"] for row in rows(f"sciknoweval_sdpo/{subject}_test.jsonl")]
    texts = [f"<reasoning>\nA, B, C or D?\n</reasoning>\n<answer>\n{answer}\n</answer>\n" for answer in answers]
    assert {score.reward for score in ChoiceReward()(prompts(answers), texts)} == {1.0}
    other = [
        text.replace(f"\n{a}\n", f"\n{'ABCD'['ABCD'.index(a) - 1]}\n") for text, a in zip(texts, answers, strict=True)
    ]
    assert {score.reward for score in ChoiceReward()(prompts(answers), other)} == {0.0}
