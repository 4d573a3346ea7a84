"""References of real tool-use and multiple-choice rows get the full reward, those of other rows do not."""

import json
import os
from pathlib import Path

import pytest

from megatron_rft.records import Prompt
from megatron_rft.rewards.choice import ChoiceReward
from megatron_rft.rewards.tools.calls import tool_calls
from megatron_rft.rewards.tools.verifier import ToolReward

FOLDER = Path(os.environ.get("MEGATRON_RFT_DATA", Path(__file__).parents[5] / "shared" / "data"))
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no benchmark rows in {FOLDER} (MEGATRON_RFT_DATA)")


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


@pytest.mark.parametrize("subject", ["biology", "chemistry", "material", "physics"])
def test_sciknoweval(subject):
    answers = [row["answer"] for row in rows(f"sciknoweval_sdpo/{subject}_test.jsonl")]
    texts = [f"<reasoning>\nA, B, C or D?\n</reasoning>\n<answer>\n{answer}\n</answer>\n" for answer in answers]
    assert {score.reward for score in ChoiceReward()(prompts(answers), texts)} == {1.0}
    other = [
        text.replace(f"\n{a}\n", f"\n{'ABCD'['ABCD'.index(a) - 1]}\n") for text, a in zip(texts, answers, strict=True)
    ]
    assert {score.reward for score in ChoiceReward()(prompts(answers), other)} == {0.0}
