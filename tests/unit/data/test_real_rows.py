"""Every row of the benchmarks' files goes through its adapter. The rows are not part of this project."""

import json
import os
import re
from pathlib import Path

import pytest

from megatron_rft.config.datasets import DATASETS, TEMPLATES
from megatron_rft.data.prompts import prompt_set
from megatron_rft.data.rendering import PromptFormat, as_text
from megatron_rft.data.rows import load_rows

FOLDER = Path(os.environ.get("MEGATRON_RFT_DATA", Path(__file__).parents[4] / "shared" / "data"))
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no benchmark rows in {FOLDER} (MEGATRON_RFT_DATA)")

# file -> (adapter, rows, rows without an answer or otherwise of no use)
FILES = {
    "gsm8k_train.jsonl": ("gsm8k", 7473, 0),
    "gsm8k_test.jsonl": ("gsm8k", 1319, 0),
    "math_test.jsonl": ("math", 200, 0),
    "math_train_verl.jsonl": ("math", 200, 0),
    "math500.jsonl": ("math500", 200, 0),
    "aime24.jsonl": ("aime24", 30, 0),
    "aime25.jsonl": ("aime25", 30, 0),
    "amc23.jsonl": ("amc23", 40, 0),
    "olympiadbench.jsonl": ("olympiadbench", 200, 0),
    "gaokao2023en.jsonl": ("gaokao2023en", 200, 2),
    "humaneval.jsonl": ("humaneval", 164, 0),
    "mbpp.jsonl": ("mbpp", 200, 0),
    "apps_train_sample.jsonl": ("apps", 5, 0),
    "rlla_test.jsonl": ("rlla", 80, 0),
    "rlla_sft.jsonl": ("rlla", 120, 0),
    "api_bank/level-1-api_processed.jsonl": ("api_bank", 100, 0),
    "api_bank/level-2-api_processed.jsonl": ("api_bank", 40, 0),
    "api_bank/level-3-api_processed.jsonl": ("api_bank", 60, 0),
    "api_bank/lv1_lv2_dialogues.jsonl": ("api_bank", 100, 100),  # dialogues without their tools
    "sciknoweval_sdpo": ("sciknoweval", 200, 0),
}


class Letters:
    """A tokenizer with one token per character."""

    chat_template, added_tokens_decoder = None, {}
    eos_token_id = 0

    def __call__(self, texts, add_special_tokens=True, return_attention_mask=True):
        return {"input_ids": [[ord(letter) for letter in text] for text in texts]}


def rows_of(name: str):
    path = FOLDER / name
    if not path.exists():
        pytest.skip(f"no {path}")
    return load_rows(path, adapter=FILES[name][0], files="*.jsonl" if path.is_dir() else None)


@pytest.mark.parametrize("name", FILES)
def test_every_row_becomes_a_prompt(name):
    adapter, count, useless = FILES[name]
    rows, known = rows_of(name), DATASETS[adapter]
    assert len(rows) == count
    if useless == count:
        assert all("unusable" in row for row in rows)
        return
    form = PromptFormat(
        prompt_template=known.template, max_prompt_tokens=10**6, answered=known.reward != "code", adapted=True
    )
    found = prompt_set(rows, Letters(), form, name)
    assert len(found.prompts) == count - useless and sum(found.dropped.values()) == useless
    for prompt in found.prompts:
        assert prompt.fields["tests"]["kind"] if known.reward == "code" else prompt.answer
        if known.reward == "math":
            assert prompt.text == TEMPLATES["boxed"].format(question=rows[prompt.index]["question"])
            assert prompt.text.count("\\boxed{}.") == 1  # the template's own; the carriers' are off


def test_levels_and_subjects():
    math = rows_of("math500.jsonl") + rows_of("math_test.jsonl") + rows_of("math_train_verl.jsonl")
    assert {row["level"] for row in math} == set("12345") and len({row["subject"] for row in math}) == 7
    assert {row["subject"] for row in rows_of("olympiadbench.jsonl")} == {
        "Algebra",
        "Combinatorics",
        "Geometry",
        "Number Theory",
    }
    assert {row["subject"] for row in rows_of("sciknoweval_sdpo")} == {"biology", "chemistry", "material", "physics"}
    assert {row["level"] for row in rows_of("api_bank/level-3-api_processed.jsonl")} == {"3"}


def test_traps():
    numbers = [row["answer"] for name in ("aime24", "aime25", "amc23") for row in rows_of(f"{name}.jsonl")]
    assert all(re.fullmatch(r"-?\d+(\.\d*[1-9])?", number) for number in numbers)
    several = [row for row in rows_of("math_test.jsonl") if row["solution"].count("\\boxed") > 1]
    assert len(several) == 2 and all(
        row["solution"].rpartition("\\boxed{")[2].startswith(row["answer"]) for row in several
    )
    assert not any("solution" in row["answer"] for row in rows_of("gaokao2023en.jsonl"))
    for level in (1, 2, 3):
        for row in rows_of(f"api_bank/level-{level}-api_processed.jsonl"):
            (call,) = json.loads(row["answer"])
            assert set(call) == {"name", "parameters"}


def test_choices_hold_the_right_one():
    for row in rows_of("sciknoweval_sdpo"):
        assert row["answer"] in row["choices"] and as_text(row["history"]).count("<answer>") >= 1
