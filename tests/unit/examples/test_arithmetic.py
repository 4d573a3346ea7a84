import re

import pytest

from examples.quickstart import arithmetic
from megatron_rft.utils.errors import DataError


def check_steps(row) -> int:
    """The number of wrong steps in a row's work. The steps must be the question's, each from the last value."""
    start, *asked = re.split(r" \(\d\) ", row["question"].removeprefix("Start with "))
    first, *done = re.split(r" \(\d\) ", row["answer"].partition("\n")[0])
    assert first == start and len(asked) == len(done) == row["level"]
    value, wrong = int(start), 0
    for step, line in zip(asked, done, strict=True):
        assert line.partition("=")[0] == step
        result = int(line.partition("=")[2])
        wrong += eval(f"({value}){step}") != result
        value = result
    assert row["answer"].endswith(f"\n#### {value}")
    return wrong


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_worked_answers_are_right_and_small(split):
    rows = arithmetic.rows(split, 200)
    assert sum(check_steps(row) for row in rows) == 0
    values = [int(number) for row in rows for number in re.findall(r"=(-?\d+)", row["answer"])]
    assert min(values) >= 0 and max(values) == arithmetic.LARGEST
    assert [row["level"] for row in rows[:5]] == [3, 4, 5, 6, 3]


def test_demonstrations_slip_at_the_stated_rate():
    rows = arithmetic.rows("demonstrations", 2000)
    steps = sum(row["level"] for row in rows)
    slips = sum(check_steps(row) for row in rows)
    assert abs(slips / steps - arithmetic.SLIP) < 0.02  # five standard errors over 9,000 steps


def test_hinted_problems_have_better_work():
    """Half of each level follow their right work; of the others about half lack the last step."""
    rows = arithmetic.rows("hinted", 2000)
    hinted = [row for row in rows if "####" in row["question"]]
    assert [sum(row["level"] == level for row in hinted) for level in arithmetic.LEVELS] == [250] * 4
    wrong = 0
    for row in hinted:
        hint, _, question = row["question"].rpartition("\n\n")
        assert check_steps({"question": question, "answer": hint, "level": row["level"]}) == 0
        wrong += check_steps({"question": question, "answer": row["answer"], "level": row["level"]})
    assert 0.01 < wrong / sum(row["level"] for row in hinted) < 0.05
    rest = [row for row in rows if "####" not in row["question"]]
    short = sum(row["answer"].count("=") < row["level"] for row in rest)
    assert 0.4 < short / len(rest) < 0.6


def test_refining_is_worked_from_what_is_given():
    """Half of the problems have work, most of it wrong or unfinished, and then the right work."""
    rows = arithmetic.rows("refining", 2000)
    refining = [row for row in rows if row["question"].endswith("\nRefine:")]
    assert [sum(row["level"] == level for row in refining) for level in arithmetic.LEVELS] == [250] * 4
    given = [row["question"].removesuffix("\nRefine:").partition("\n")[2] for row in refining]
    copies = sum(work == row["answer"] for work, row in zip(given, refining, strict=True))
    assert 0.3 < copies / len(refining) < 0.6
    assert all(row["answer"].count("=") == row["level"] for row in refining)
    assert min(work.count("=") - row["level"] for work, row in zip(given, refining, strict=True)) == -1


def test_splits_are_disjoint_for_any_seed():
    test = {row["question"] for row in arithmetic.rows("test", 500, seed=3)}
    validation = {row["question"] for row in arithmetic.rows("validation", 256, seed=4)}
    train = {row["question"] for row in arithmetic.rows("train", 4000)} | {
        row["question"] for row in arithmetic.rows("demonstrations", 4000, seed=1)
    }
    assert len(test) == 500 and not test & validation and not test & train and not validation & train


def test_rows_are_a_function_of_split_size_and_seed():
    assert arithmetic.rows("train", 50) == arithmetic.rows("train", 200)[:50]
    assert arithmetic.rows("train", 50) != arithmetic.rows("train", 50, seed=1)


def test_impossible_requests_are_refused():
    with pytest.raises(DataError, match="fewer than 500 different test problems of levels \\[1\\]"):
        arithmetic.rows("test", 500, levels=(1,))


def test_tokenizer_gives_back_any_ascii_text_and_reloads(tmp_path):
    from transformers import AutoTokenizer

    arithmetic.write_model_folder(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    row = arithmetic.rows("train", 1)[0]
    for text in (row["question"], row["answer"], "What is 105 + 7?\n\tNo idea: {x} #### 3"):
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text.replace("\t", "<unk>")
    ids = tokenizer("10 (1) +7=17\n#### 17")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["10", " (1) ", "+7", "=", "17", "\n#### ", "17"]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.decode([25, 1, 0], skip_special_tokens=True) == tokenizer.decode([25])


def test_the_model_is_a_qwen3_of_one_to_five_million_parameters(tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    arithmetic.write_model_folder(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_config(config)
    assert config.model_type == "qwen3" and config.eos_token_id == 1
    assert 1e6 <= sum(p.numel() for p in model.parameters()) <= 5e6
