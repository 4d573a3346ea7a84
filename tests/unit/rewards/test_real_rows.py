"""Reference answers of real benchmarks match themselves, and not the answers of other rows."""

import json
import os
import re
from pathlib import Path

import pytest

from megatron_rft.data.prompts import reference_answer
from megatron_rft.records import Prompt
from megatron_rft.rewards.math import MathReward

FOLDER = Path(os.environ.get("MEGATRON_RFT_DATA", Path(__file__).parents[4] / "shared" / "data"))
FIELDS = {
    "gsm8k_test": "answer",
    "gsm8k_train": "answer",
    "math500": "answer",
    "math_test": "solution",
    "aime24": "answer",
    "aime25": "answer",
    "amc23": "answer",
    "olympiadbench": "final_answer",
}
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no benchmark rows in {FOLDER} (MEGATRON_RFT_DATA)")


@pytest.fixture(scope="module")
def reward():
    reward = MathReward()
    yield reward
    reward.close()


def references(name: str, count: int = 40) -> list[Prompt]:
    path = FOLDER / f"{name}.jsonl"
    if not path.is_file():
        pytest.skip(f"no {path}")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows = rows[:: max(len(rows) // count, 1)][:count]
    return [Prompt(index, (1,), "", reference_answer(row[FIELDS[name]])) for index, row in enumerate(rows)]


def boxed(answer: str) -> str:
    return answer if "\\boxed" in answer else f"\\boxed{{{answer}}}"


WRITTEN = {
    "in a formula": lambda answer: f"so ${boxed(answer)}$.",
    "after a wrong one": lambda answer: f"Not \\boxed{{-77}}, but\n\\[{boxed(answer)}\\]",
    "with thoughts": lambda answer: f"<think>\\boxed{{3}}</think> The final answer is {boxed(answer)}",
    "other fractions": lambda answer: boxed(answer).replace("\\frac", "\\dfrac"),
    "more space": lambda answer: boxed(answer).replace("+", " + ").replace("=", " = "),
    "sized brackets": lambda answer: boxed(re.sub(r"^\((.*)\)$", r"\\left(\1\\right)", answer)),
}


@pytest.mark.parametrize("name", ["math500", "olympiadbench", "gsm8k_test"])
def test_references_in_other_notations_are_verified(name, reward):
    prompts = references(name)
    for how, write in WRITTEN.items():
        scores = reward(prompts, [write(prompt.answer) for prompt in prompts])
        assert (how, [prompts[i].answer for i, score in enumerate(scores) if score.reward != 1.0]) == (how, [])


@pytest.mark.parametrize("name", FIELDS)
def test_references_verify_against_themselves_and_not_each_other(name, reward):
    prompts = references(name)
    answers = [prompt.answer if "\\boxed" in prompt.answer else f"\\boxed{{{prompt.answer}}}" for prompt in prompts]
    right = reward(prompts, [f"Step by step.\n{answer}" for answer in answers])
    assert [prompts[i].answer for i, score in enumerate(right) if score.reward != 1.0] == []
    # The next row's answer plus one cannot be this row's, unless the two are alike to begin with.
    shifted = answers[1:] + answers[:1]
    wrong = reward(prompts, [answer.replace("\\boxed{", "\\boxed{7.125+") for answer in shifted])
    assert sum(score.reward for score in wrong) == 0
