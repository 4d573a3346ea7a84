"""Bad data, tokenizers, folders and numbers: each gives one clear error at the start, and loses nothing.

Mistakes that the recipe alone shows (model folder, architecture, world size) are in tests/unit/commands/test_main.py
and test_config.py. These runs go through the command line, in this process.
"""

import json
import re

import pyarrow.parquet
import pytest
from safetensors.torch import load_file

from megatron_rft.commands.main import main
from megatron_rft.records import Batch
from tests.integration.tiny import write_recipe


def refused(capsys, recipe, *arguments: str) -> str:
    assert main(["train", str(recipe), *arguments]) == 2
    return capsys.readouterr().err


def test_missing_field_lists_the_fields_there_are(tmp_path, capsys):
    error = refused(capsys, write_recipe(tmp_path, data={"prompt_field": "qestion"}))
    assert "'qestion'" in error and "'question', 'answer'" in error and "Did you mean 'question'?" in error


def test_a_missing_function_of_rows_is_named_with_its_option(tmp_path, capsys):
    file = tmp_path / "make_rows.py"
    file.write_text("def rows(split, limit):\n    return []\n")
    error = refused(capsys, write_recipe(tmp_path, data={"train": f"{file}:row"}))
    assert f"error: data.train: path: {file} has no row. Did you mean 'rows'?" in error


def test_empty_data_set(tmp_path, capsys):
    recipe = write_recipe(tmp_path)
    (tmp_path / "train.jsonl").write_text("\n")
    assert "train.jsonl: the data set is empty" in refused(capsys, recipe)


def test_broken_line_is_named(tmp_path, capsys):
    recipe = write_recipe(tmp_path)
    (tmp_path / "train.jsonl").write_text('{"question": "1", "answer": "1"}\n{"question": "2", "answ\n')
    assert "train.jsonl:2: not JSON" in refused(capsys, recipe)


GOOD = b'{"question": "1", "answer": "1"}\n'
CHOICES = {"question": "?", "choices": {"label": ["A", "B"], "text": ["x"]}, "answerKey": "A"}
CODE = {"kind": "code"}


def one_sentence(error: str) -> bool:
    return error.count("\n") == 1 and "Traceback" not in error and len(error) < 500


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "é", "answer": "1"}'.encode("latin-1"), "train.jsonl:2: not UTF-8 text (byte 0xe9)"),
        (b"[" * 100_000, "train.jsonl:2: its brackets are nested more deeply than can be read"),
        (b'{"question": 1, "answer": %s}' % (b"9" * 6000), "train.jsonl:2: an integer has more than 4300 digits"),
        (b'{"question": "\\ud83d", "answer": "1"}', "train.jsonl:2: its text has half of a character, \\ud83d"),
        (
            b'{"question": "1", "question": "2", "answer": "1"}',
            "train.jsonl:2: one object has the key 'question' twice",
        ),
        (b'{"question": null, "answer": "1"}', "train.jsonl:2: the field 'question' is null"),
        (b'{"question": "1", "answer": {"value": 1}}', "train.jsonl:2: the field 'answer' is an object"),
        (b'{"question": "1", "answer": NaN}', "train.jsonl:2: the field 'answer' is NaN"),
        (b'{"question": ["1"], "answer": "1"}', "train.jsonl:2: the field 'question': a message has a role"),
        (
            b'{"question": [{"role": "user", "content": "1"}], "answer": "1"}',
            "train.jsonl:2: the prompt is a list of messages, but the tokenizer has no chat template",
        ),
    ],
)
def test_a_bad_row_is_one_sentence_with_file_and_row(tmp_path, capsys, line, message):
    recipe = write_recipe(tmp_path)
    (tmp_path / "train.jsonl").write_bytes(GOOD + line + b"\n")
    error = refused(capsys, recipe)
    assert message in error and "data.train" in error and one_sentence(error)


def test_utf_16_is_named(tmp_path, capsys):
    recipe = write_recipe(tmp_path)
    (tmp_path / "train.jsonl").write_bytes(GOOD.decode().encode("utf-16"))
    error = refused(capsys, recipe)
    assert "train.jsonl:1: not UTF-8 text" in error and "UTF-16" in error and one_sentence(error)


@pytest.mark.parametrize("end", [-20, 100])
def test_a_truncated_parquet_file_is_named(tmp_path, capsys, end):
    recipe = write_recipe(tmp_path, data={"train": str(tmp_path / "train.parquet")})
    pyarrow.parquet.write_table(pyarrow.table({"question": ["1"], "answer": ["1"]}), tmp_path / "whole")
    (tmp_path / "train.parquet").write_bytes((tmp_path / "whole").read_bytes()[:end])
    error = refused(capsys, recipe)
    assert "train.parquet: cannot be read as a parquet file" in error and one_sentence(error)


def test_a_recipe_that_is_not_utf_8_is_named(tmp_path, capsys):
    recipe = write_recipe(tmp_path)
    recipe.write_bytes(recipe.read_bytes() + "# é\n".encode("latin-1"))
    error = refused(capsys, recipe)
    assert re.search(r"recipe\.yaml:\d+: not UTF-8 text \(byte 0xe9\)", error) and one_sentence(error)


@pytest.mark.parametrize(
    ("adapter", "row", "reward", "message"),
    [
        ("sciknoweval", CHOICES, {"kind": "choice"}, "its choices have 2 labels and 1 texts"),
        ("livecodebench", {"question_content": "?", "public_test_cases": "[{"}, CODE, "public_test_cases is not JSON"),
    ],
)
def test_a_bad_row_of_an_adapter_is_one_sentence(tmp_path, capsys, adapter, row, reward, message):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n" + json.dumps(row) + "\n")
    recipe = write_recipe(tmp_path, data={"train": {"path": str(path), "adapter": adapter}}, reward=reward)
    error = refused(capsys, recipe)
    assert f"rows.jsonl:2 (adapter {adapter}): {message}" in error and one_sentence(error)


def test_a_template_reads_no_attributes(tmp_path, capsys):
    recipe = write_recipe(tmp_path, data={"prompt_template": "{question.__class__}"})
    error = refused(capsys, recipe)
    assert "data.prompt_template: {question.__class__} reads an attribute" in error and one_sentence(error)


def test_a_byte_order_mark_is_read(tmp_path, capsys):
    """The error is in the second row, so the first, after the mark, was read."""
    recipe = write_recipe(tmp_path)
    (tmp_path / "train.jsonl").write_bytes(b"\xef\xbb\xbf" + GOOD + b"{")
    assert "train.jsonl:2: not JSON" in refused(capsys, recipe)


def test_prompts_that_are_all_too_long(tmp_path, capsys):
    recipe = write_recipe(tmp_path)
    (tmp_path / "train.jsonl").write_text(json.dumps({"question": "1" * 30, "answer": "1"}) + "\n")
    error = refused(capsys, recipe)
    assert "all 1 prompts are longer than data.max_prompt_tokens=8" in error and "at least 30" in error


def test_tokenizer_of_another_model(tmp_path, capsys):
    recipe = write_recipe(tmp_path)
    config = json.loads((tmp_path / "model/config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps(config | {"vocab_size": 6}))
    error = refused(capsys, recipe)
    assert "ids go up to 7" in error and "vocabulary of 6" in error and "model.tokenizer" in error


def test_folder_with_another_run(tmp_path, capsys):
    recipe = write_recipe(tmp_path, run={"steps": 1})
    assert main(["train", str(recipe)]) == 0
    capsys.readouterr()
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    error = refused(capsys, recipe, "optimizer.lr=0.5")
    assert "holds another run" in error and "optimizer.lr: 0.01 there, 0.5 now" in error
    assert "run.resume is 'never'" in refused(capsys, recipe, "run.resume=never")
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before


def test_a_start_that_was_refused_does_not_hold_the_folder(tmp_path, capsys):
    recipe = write_recipe(tmp_path, run={"steps": 1})
    nobody = ["rollout.engine=vllm", "rollout.placement=server", "rollout.servers=[http://127.0.0.1:9]"]
    assert "http://127.0.0.1:9" in refused(capsys, recipe, *nobody)
    assert (tmp_path / "run/recipe.yaml").exists()
    assert main(["train", str(recipe), "optimizer.lr=0.02"]) == 0


def test_folder_with_something_else(tmp_path, capsys):
    recipe = write_recipe(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/thesis.tex").write_text("years of work")
    assert "holds other files (thesis.tex" in refused(capsys, recipe)
    assert (tmp_path / "run/thesis.tex").read_text() == "years of work"


def test_numbers_that_blow_up_end_the_run_with_the_batch_kept(tmp_path, capsys):
    """At this rate the first step makes weights of 1e20, and no later loss is finite. A resumed run does the same."""
    recipe = write_recipe(
        tmp_path,
        trainer="sft",
        run={"steps": 20},
        algorithm={"name": "sft", "batch_sequences": 4},
        optimizer={"lr": 1e20},
        rollout={"max_response_tokens": 8},
        faults={"max_skipped_steps": 2},
    )
    text = recipe.read_text()
    for unused in ("kl_coefficient: 0.01", "mini_batch_prompts: 2", "group_size: 8", "prompts_per_step: 4"):
        text = "\n".join(line for line in text.splitlines() if unused not in line)
    recipe.write_text(text)
    assert main(["train", str(recipe)]) == 3
    error = capsys.readouterr().err
    assert "not finite 3 times in a row" in error and "faults.max_skipped_steps = 2" in error
    (kept,) = (tmp_path / "run").glob("failed_batch_step_*.safetensors")
    assert len(Batch.from_state_dict(load_file(kept))) == 4
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["faults/skipped_steps"] == 2
    assert main(["train", str(recipe)]) == 3
    assert "resumed after step 2" in capsys.readouterr().out
    again = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["faults/skipped_steps"] for line in again] == [line["faults/skipped_steps"] for line in lines]
