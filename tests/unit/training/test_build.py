"""The fields of an adapter's rows that are compared with and trained on."""

import json

import pytest
from transformers import Qwen3Config

from examples.quickstart import arithmetic
from megatron_rft.config import Data, Model, load
from megatron_rft.config.environment import Own
from megatron_rft.training import build, online, sft
from megatron_rft.training.problems import Problems
from megatron_rft.utils.errors import DataError


def test_sft_learns_the_solution_and_is_measured_by_the_answer(tmp_path):
    row = {"question": "3+4?", "answer": "3+4=<<3+4=7>>7\n#### 7"}
    (tmp_path / "gsm8k.jsonl").write_text(json.dumps(row) + "\n")
    source = f"{{adapter: gsm8k, path: {tmp_path}/gsm8k.jsonl}}"
    path = tmp_path / "sft.yaml"
    path.write_text(
        f"trainer: sft\nrun: {{output_dir: {tmp_path}/out, steps: 1}}\nmodel: {{path: m}}\n"
        f"data: {{train: {source}, test: {source}, prompt_template: '{{question}} '}}\n"
    )
    problems, tokenizer = Problems(load(path).data), arithmetic.tokenizer()
    (learned,), _ = problems.demonstrations(tokenizer, limit=100)
    assert tokenizer.decode(learned.response_ids, skip_special_tokens=True) == "3+4=7\n#### 7"
    (asked,) = problems.prompts("test", tokenizer).prompts
    assert (asked.answer, asked.text, asked.fields["solution"]) == ("7", "3+4? ", "3+4=7\n#### 7")


def test_rows_of_an_adapter_without_a_solution_are_left_out(tmp_path):
    """Some problems of APPS and TACO have none."""
    row = {"question": "Add.", "input_output": json.dumps({"inputs": ["1"], "outputs": ["1"]})}
    rows = [row | {"solutions": ""}, row | {"solutions": json.dumps(["1+2"])}]
    (tmp_path / "apps.jsonl").write_text("\n".join(map(json.dumps, rows)))
    problems = Problems(Data(train={"adapter": "apps", "path": f"{tmp_path}/apps.jsonl"}))
    (learned,), dropped = problems.demonstrations(arithmetic.tokenizer(), limit=100)
    assert learned.prompt.index == 1 and dropped == {"empty answer": 1}
    (tmp_path / "apps.jsonl").write_text(json.dumps(rows[0]))
    with pytest.raises(DataError, match="data.train: .* 'solution' is empty or missing in every row"):
        problems.demonstrations(arithmetic.tokenizer(), limit=100)


def test_wrong_rows_of_evaluations_are_found_before_anything_is_built(tmp_path, monkeypatch):
    """SFT reads its test set after the last step otherwise."""
    (tmp_path / "train.jsonl").write_text(json.dumps({"question": "3+4?", "answer": "7"}))
    (tmp_path / "test.jsonl").write_text(json.dumps({"question": "3+4?", "result": "7"}))
    path = tmp_path / "sft.yaml"
    path.write_text(
        f"trainer: sft\nrun: {{output_dir: {tmp_path}/out, steps: 1}}\nmodel: {{path: m}}\n"
        f"data: {{train: {tmp_path}/train.jsonl, test: {tmp_path}/test.jsonl}}\n"
    )
    monkeypatch.setattr(build, "load_model_files", lambda *_: (arithmetic.tokenizer(), None))
    monkeypatch.setattr(build, "Networks", None)
    for trainer, more in ((sft, []), (online, ["trainer=rl"])):
        with pytest.raises(DataError, match=r"data.test: .*test.jsonl:1 has no field 'answer' \(data.answer_field\)"):
            trainer.train(load(path, more))


def test_a_column_of_images_that_no_row_has_is_named(tmp_path):
    """Else the model would learn without its images. An environment may show them instead."""
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "How many?", "answer": "3", "images": "a.png"}) + "\n")
    data = Data(train=str(tmp_path / "rows.jsonl"), image_field="image", chat=True)
    there = r"the first has 'question', 'answer', 'images'. Did you mean 'images'\?"
    with pytest.raises(DataError, match=rf"data.train: no row has the column 'image' \(data.image_field\); {there}"):
        Problems(data).prompts("train", arithmetic.tokenizer())
    assert Problems(data, Own(episode="a.py:A")).rows("train")


def test_a_model_without_a_tokenizer_is_named(tmp_path):
    """transformers makes an empty tokenizer for it, with which every prompt is empty."""
    Qwen3Config().save_pretrained(tmp_path)
    with pytest.raises(DataError, match=f"model.path: {tmp_path} has no tokenizer .* Set model.tokenizer to a folder"):
        build.load_tokenizer(Model(path=str(tmp_path)))


def test_a_stop_is_one_token_that_the_tokenizer_has():
    tokenizer = arithmetic.tokenizer()
    end, one = tokenizer.eos_token_id, tokenizer.encode("1")
    assert build.stop_token_ids(["1", end], tokenizer) == (end, *one)
    for stop, count in ((len(tokenizer), 0), (-1, 0), ("1=", 2), ("", 0)):
        with pytest.raises(DataError, match=f"rollout.stop {stop!r} is {count} tokens"):
            build.stop_token_ids([stop], tokenizer)
