import json
from dataclasses import replace

import pyarrow.parquet
import pytest

from examples.quickstart import arithmetic
from megatron_rft.data.prompts import (
    as_batch,
    check_tokenizer,
    demonstrations,
    prompt_set,
    reference_answer,
)
from megatron_rft.data.rendering import PromptFormat, ask_again
from megatron_rft.data.rows import Rows, load_rows
from megatron_rft.utils.errors import DataError

ROWS = [
    {"question": "3+4", "answer": "3+4=7\n#### 7", "level": 1},
    {"question": "3+4+5+6", "answer": "?\n#### 18", "level": 3},
]


@pytest.fixture(scope="module")
def tokenizer():
    return arithmetic.tokenizer()


def test_prompts_keep_row_numbers_fields_and_answers(tokenizer):
    found = prompt_set(ROWS, tokenizer, PromptFormat(prompt_template="{question}\n", max_prompt_tokens=8), "rows")
    first, second = found.prompts
    assert (first.text, first.answer, first.fields, first.index) == (
        "3+4\n",
        "7",
        {"answer": "3+4=7\n#### 7", "level": 1},
        0,
    )
    assert tokenizer.decode(first.token_ids) == "3+4\n" and second.index == 1 and found.dropped == {}


def test_long_prompts_are_dropped_and_counted_or_refused(tokenizer):
    kept = prompt_set(ROWS[::-1], tokenizer, PromptFormat(max_prompt_tokens=2), "rows")
    assert [prompt.index for prompt in kept.prompts] == [1] and kept.dropped == {"prompt too long": 1}
    with pytest.raises(DataError, match="all 2 prompts .* the shortest has 2 tokens.* to at least 2"):
        prompt_set(ROWS, tokenizer, PromptFormat(max_prompt_tokens=1), "rows")


MESSAGES = [{"role": "user", "content": "1"}]


@pytest.mark.parametrize(
    ("row", "form", "message"),
    [
        ({"question": None}, {}, ": the field 'question' is null"),
        ({"question": [1]}, {}, ": the field 'question': a message has a role"),
        ({"question": MESSAGES}, {}, ": the prompt is a list of messages, but the tokenizer has no chat template"),
        ({"answer": {}}, {}, ": the field 'answer' is an object"),
        ({}, {"prompt_template": "{level}"}, " has no field 'level'"),
    ],
)
def test_a_row_of_a_folder_is_named_by_its_file_and_line(tokenizer, tmp_path, row, form, message):
    good = json.dumps({"question": "3+4", "answer": "7"} | ({"level": 1} if form.get("prompt_template") else {}))
    (tmp_path / "a.jsonl").write_text(f"{good}\n" * 2)
    (tmp_path / "b.jsonl").write_text("\n\n" + json.dumps({"question": "3+4", "answer": "7"} | row))
    with pytest.raises(DataError, match=rf"b\.jsonl:3{message}"):
        prompt_set(load_rows(tmp_path), tokenizer, PromptFormat(**form), "folder")


def test_a_row_to_learn_and_one_of_parquet_are_named_by_their_file(tokenizer, tmp_path):
    rows = [{"question": "1", "answer": "1"}, {"question": "1", "answer": ["2"]}]
    (tmp_path / "a.jsonl").write_text("\n" + "\n".join(map(json.dumps, rows)))
    with pytest.raises(DataError, match=r"a\.jsonl:3: the field 'answer' is a list"):
        demonstrations(load_rows(tmp_path / "a.jsonl"), tokenizer, PromptFormat(), "file", max_response_tokens=99)
    pyarrow.parquet.write_table(pyarrow.table({"question": ["1", None], "answer": ["1", "2"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet, row 2: the field 'question' is null"):
        prompt_set(load_rows(tmp_path / "a.parquet"), tokenizer, PromptFormat(), "file")


def test_places_of_good_rows_are_not_looked_up(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text(json.dumps({"question": MESSAGES, "answer": "1"}))
    talking = arithmetic.tokenizer()
    talking.chat_template = TEMPLATE
    monkeypatch.setattr(Rows, "place", None)
    assert prompt_set(load_rows(tmp_path / "a.jsonl"), talking, PromptFormat(), "file").prompts


def test_missing_fields_list_what_there_is(tokenizer):
    with pytest.raises(DataError, match=r"row 1 has no field 'answers' .*'question', 'answer', 'level'.*'answer'\?"):
        prompt_set(ROWS, tokenizer, PromptFormat(answer_field="answers"), "rows")
    with pytest.raises(
        DataError, match=r"'question', 'level'\. Where no reward compares with it, name any that has text"
    ):
        prompt_set([{"question": "1", "level": 1}], tokenizer, PromptFormat(), "rows")
    with pytest.raises(DataError, match="no field 'problem' .data.prompt_template."):
        prompt_set(ROWS, tokenizer, PromptFormat(prompt_template="{problem}"), "rows")
    with pytest.raises(DataError, match="row 2 has no field 'question'"):
        prompt_set([ROWS[0], {"answer": "1"}], tokenizer, PromptFormat(), "rows")
    with pytest.raises(DataError, match="literal braces"):
        prompt_set(ROWS, tokenizer, PromptFormat(prompt_template="{question} \\boxed{"), "rows")


def test_rows_without_an_answer_are_counted_or_refused(tokenizer):
    rows = [{"question": "1", "answer": ""}, {"question": "2", "answer": "3"}]
    assert prompt_set(rows, tokenizer, PromptFormat(), "rows").dropped == {"empty answer": 1}
    with pytest.raises(DataError, match="'answer' .data.answer_field. is empty in every row"):
        prompt_set(rows[:1], tokenizer, PromptFormat(), "rows")


def test_chat_template(tokenizer):
    with pytest.raises(DataError, match="no chat template"):
        prompt_set(ROWS, tokenizer, PromptFormat(chat=True), "rows")
    talking = arithmetic.tokenizer()
    talking.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}bot: "
    assert prompt_set(ROWS, talking, PromptFormat(chat=True), "rows").prompts[0].text == "user: 3+4\nbot: "


def test_variables_of_the_chat_template(tokenizer):
    talking = arithmetic.tokenizer()
    talking.chat_template = "{{ messages[0]['content'] }}{% if enable_thinking is false %} off{% endif %}"
    form = PromptFormat(chat=True, chat_template_kwargs={"enable_thinking": False})
    prompt = prompt_set(ROWS, talking, form, "rows").prompts[0]
    assert prompt.text == "3+4 off"
    assert talking.decode(ask_again(prompt, "5", talking, form)).endswith("5 off")
    with pytest.raises(DataError, match="the tokenizer's chat template does not read 'enable_thinkin'"):
        prompt_set(ROWS, talking, replace(form, chat_template_kwargs={"enable_thinkin": False}), "rows")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% if messages|length > 1 %}{{ raise_exception('No system role') }}{% endif %}", "No system role"),
        ("{% for m in messages %}", "Unexpected end of template"),
        ("{{ messages[-1]['content'] + 1 }}", "can only concatenate str"),
    ],
)
def test_a_chat_template_that_fails_is_named_with_its_row(tokenizer, template, reason):
    rows = [{"question": "3+4", "answer": "7", "history": []}, {"question": "3+4", "answer": "7", "history": ASKED}]
    failing = arithmetic.tokenizer()
    failing.chat_template = template
    form = PromptFormat(chat=True, adapted=True)
    with pytest.raises(DataError, match=f"row [12]: the tokenizer's chat template fails .{reason}.*model.tokenizer"):
        prompt_set(rows, failing, form, "rows")
    second = prompt_set(rows, tokenizer, PromptFormat(adapted=True), "rows").prompts[1]
    with pytest.raises(DataError, match=f"row 2: the tokenizer's chat template fails .{reason}"):
        ask_again(second, "5", failing, form)


def test_templates_by_name_and_by_text(tokenizer):
    boxed = prompt_set(ROWS, tokenizer, PromptFormat(prompt_template="boxed"), "rows").prompts[0].text
    assert boxed == "3+4 Let's think step by step and output the final answer within \\boxed{}."
    fpa = prompt_set(ROWS, tokenizer, PromptFormat(prompt_template="fpa"), "rows").prompts[0].text
    assert fpa.endswith("The final answer is \\boxed{X}, where X is your final answer.\nQ:3+4\nA:")


ASKED = [{"role": "system", "content": "Be brief."}]
TALKED = [*ASKED, {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]


def test_an_adapters_history_comes_before_the_question(tokenizer):
    rows = [{"question": "3+4", "answer": "7", "history": history} for history in (ASKED, TALKED)]
    form = PromptFormat(prompt_template="{question}?", adapted=True)
    plain = [prompt.text for prompt in prompt_set(rows, tokenizer, form, "rows").prompts]
    assert plain == ["Be brief.\n\n3+4?", "Be brief.\n\nUser: Hi\n\nAssistant: Yes?\n\nUser: 3+4?\n\nAssistant:"]
    talking = arithmetic.tokenizer()
    talking.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}|{% endfor %}"
    chat = [prompt.text for prompt in prompt_set(rows, talking, replace(form, chat=True), "rows").prompts]
    assert chat == ["system: Be brief.|user: 3+4?|", "system: Be brief.|user: Hi|assistant: Yes?|user: 3+4?|"]
    own = prompt_set(rows, tokenizer, PromptFormat(), "rows").prompts  # a user's field of that name is only a field
    assert own[0].text == "3+4" and own[0].fields["history"] == ASKED


def test_a_turn_of_tool_calls_may_have_null_content(tokenizer):
    calling = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    talking = arithmetic.tokenizer()
    talking.chat_template = CALLING
    row = {"question": [TALKED[1], calling, TALKED[1]], "answer": "7"}
    (prompt,) = prompt_set([row], talking, PromptFormat(), "rows").prompts
    assert prompt.text == "user: Hi|assistant: f({})|user: Hi|bot:"


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        ("calls", 'f({"a": 1})'),
        ("none", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'),
    ],
)
def test_calls_of_earlier_turns_are_shown(template, shown):
    """Parquet leaves out a content that is null, and most rows have the arguments as JSON text."""
    call = {"id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}, "index": 0}
    said = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "2", "tool_call_id": "1"}]
    talking = arithmetic.tokenizer()
    talking.chat_template = {"calls": CALLING, "none": TEMPLATE}[template]
    row = {"question": [TALKED[1], *said, TALKED[1]], "answer": "7"}
    (prompt,) = prompt_set([row], talking, PromptFormat(), "rows").prompts
    assert prompt.text == f"user: Hi|assistant: {shown}|tool: 2|user: Hi|bot:"
    for wrong in ([{}], ["f"], '[{"name": "f"}]'):
        said[0]["tool_calls"] = wrong
        with pytest.raises(DataError, match="rows: row 1: tool_calls are a list of"):
            prompt_set([row | {"question": [TALKED[1], *said, TALKED[1]]}], talking, PromptFormat(), "rows")


def test_a_thought_that_the_chat_template_opens():
    """Unless its end is a control token: then a response's text does not show where it ends."""
    talking, row = arithmetic.tokenizer(), {"question": "3+4", "answer": "7"}
    talking.chat_template = TEMPLATE + "<think>\n"
    opened = [prompt_set([row], talking, PromptFormat(chat=chat), "rows").prompts[0].opened for chat in (True, False)]
    assert opened == [True, False]
    talking = arithmetic.tokenizer()
    talking.add_tokens(["</think>"], special_tokens=True)
    talking.chat_template = TEMPLATE + "<think>\n"
    assert not prompt_set([row], talking, PromptFormat(chat=True), "rows").prompts[0].opened


def test_a_template_that_writes_the_date_writes_the_same_one_every_day():
    talking = arithmetic.tokenizer()
    talking.chat_template = "{{ strftime_now('%d %b %Y') }}|" + TEMPLATE
    (prompt,) = prompt_set([{"question": "3", "answer": "3"}], talking, PromptFormat(chat=True), "rows").prompts
    assert prompt.text == "01 Jan 2026|user: 3|bot:"


TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}|{% endfor %}bot:"
CALLING = TEMPLATE.replace(
    "}}|", "}}{% for c in m['tool_calls'] %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}|"
)


def test_a_list_of_messages_is_rendered_by_the_chat_template(tokenizer):
    row = {"question": [*TALKED, {"role": "user", "content": "3+4"}], "answer": "7"}
    rows = [row, {"question": "5+6", "answer": "11"}]
    talking = arithmetic.tokenizer()
    talking.chat_template = TEMPLATE
    first, second = prompt_set(rows, talking, PromptFormat(), "rows").prompts
    assert first.text == "system: Be brief.|user: Hi|assistant: Yes?|user: 3+4|bot:" and first.question == "3+4"
    assert list(first.token_ids) == talking(first.text, add_special_tokens=False)["input_ids"]
    assert second.text == "5+6" and list(second.token_ids) == talking("5+6")["input_ids"]
    form = PromptFormat(prompt_template="Q: {question}")
    (first,) = prompt_set(rows[:1], talking, form, "rows").prompts
    assert first.text == "system: Be brief.|user: Hi|assistant: Yes?|user: Q: 3+4|bot:"
    again = talking.decode(ask_again(first, "1+2", talking, form))
    assert again == talking.decode(talking("system: Be brief.|user: Hi|assistant: Yes?|user: 1+2|bot:")["input_ids"])
    with pytest.raises(
        DataError, match="rows: row 1: the prompt is a list of messages, but the tokenizer has no chat template"
    ):
        prompt_set(rows, tokenizer, PromptFormat(), "rows")
    other = [{"question": ["a", "list"], "problem": "3+4", "answer": "7"}]  # a field that the template does not read
    assert prompt_set(other, tokenizer, PromptFormat(prompt_template="{problem}"), "rows").prompts[0].text == "3+4"


@pytest.mark.parametrize(
    ("row", "form", "message"),
    [
        ({"question": None}, {}, "row 2: the field 'question' is null, not text or a number"),
        ({"question": float("nan")}, {}, "row 2: the field 'question' is NaN"),
        ({"question": {"text": "1"}}, {}, "row 2: the field 'question' is an object, .*: {'text': '1'}"),
        ({"question": ["1"]}, {}, "row 2: the field 'question': a message has a role and a content, not 1"),
        ({"question": TALKED}, {}, "row 2: the field 'question': its messages do not end with the user's turn"),
        ({"question": [{"role": "user", "content": ["1"]}]}, {}, "row 2: .* the content of a message is text, not"),
        ({"question": [{"role": "user", "content": None}]}, {}, "row 2: .* the content of a message is text, not null"),
        ({"question": [{"role": "user", "content": 0}]}, {}, "row 2: .* the content of a message is text, not 0"),
        ({"question": [{"role": None, "content": "1"}]}, {}, "row 2: .* the role of a message is text, not null"),
        ({"question": [{"role": "assistant", "content": None}]}, {}, "row 2: .* the content of a message is text"),
        ({"answer": {"value": 1}}, {}, "row 2: the field 'answer' is an object, .*data.answer_field"),
        ({"answer": [{"value": 1}]}, {}, "row 2: the field 'answer' is an object"),
        ({"answer": float("nan")}, {}, "row 2: the field 'answer' is NaN"),
        ({"answer": float("inf")}, {}, "row 2: the field 'answer' is Infinity, not text or a finite number"),
        ({"answer": [float("-inf")]}, {}, "row 2: the field 'answer' is -Infinity"),
        ({"question": float("inf")}, {}, "row 2: the field 'question' is Infinity"),
        ({"level": float("inf")}, {"prompt_template": "{level}"}, "row 2: data.prompt_template .*'level' is Infinity"),
        ({"level": None}, {"prompt_template": "{level}{question}"}, "row 2: data.prompt_template .*'level' is null"),
        ({}, {"prompt_template": "{question:9999999999999999}"}, "row 1: data.prompt_template .*fails: MemoryError"),
        ({"level": []}, {"prompt_template": "{level[0]}"}, "row 2: data.prompt_template .*fails: IndexError"),
    ],
)
def test_what_is_no_text_is_named(tokenizer, row, form, message):
    good = {"question": "3+4", "answer": "7", "level": ["easy"]}
    with pytest.raises(DataError, match=message):
        prompt_set([good, good | row], tokenizer, PromptFormat(**form), "rows")


@pytest.mark.parametrize("template", ["{question.__class__}", "{level[0].real}", "{question:{level.real}}"])
def test_a_template_reads_no_attributes(tokenizer, template):
    row = {"question": "3+4", "answer": "7", "level": [1]}
    with pytest.raises(
        DataError, match=r"data.prompt_template: {.*} reads an attribute of a value; .*{field\[entry\]}"
    ):
        prompt_set([row], tokenizer, PromptFormat(prompt_template=template), "rows")


def test_responses_to_learn_are_text(tokenizer):
    rows = [*ROWS, {"question": "1+2", "answer": None}, {"question": "1+3", "answer": ""}]  # "": of a CSV file
    found, dropped = demonstrations(rows, tokenizer, PromptFormat(), "rows", max_response_tokens=99)
    assert len(found) == 2 and dropped == {"empty answer": 2}
    with pytest.raises(DataError, match="'answer' is empty or missing in every row"):
        demonstrations(rows[2:], tokenizer, PromptFormat(answered=False), "rows", max_response_tokens=99)
    with pytest.raises(DataError, match="row 1: the field 'answer' is a list, not text"):
        demonstrations([{"question": "1", "answer": ["2"]}], tokenizer, PromptFormat(), "rows", max_response_tokens=99)


def test_an_adapters_answer_is_taken_as_it_is(tokenizer):
    rows = [{"question": "3+4", "answer": "<response> #### Seven </response>"}]
    (prompt,) = prompt_set(rows, tokenizer, PromptFormat(adapted=True), "rows").prompts
    assert prompt.answer == rows[0]["answer"]


def test_unusable_rows_are_counted_by_reason_and_keep_the_numbers_of_the_others(tokenizer):
    rows = [{"unusable": "no tests"}, {"question": "3+4", "answer": ""}, {"unusable": "no tests"}]
    found = prompt_set(rows, tokenizer, PromptFormat(adapted=True, answered=False), "rows")
    assert [prompt.index for prompt in found.prompts] == [1] and found.dropped == {"no tests": 2}
    with pytest.raises(DataError, match="none of its 2 rows can be used: no tests"):
        prompt_set(rows[::2], tokenizer, PromptFormat(adapted=True), "rows")


def test_demonstrations_end_with_eos(tokenizer):
    found, _ = demonstrations(ROWS, tokenizer, PromptFormat(), "rows", max_response_tokens=99)
    batch = as_batch(found)
    assert batch.prompt_lens.tolist() == [2, 4] and batch.response_lens.tolist() == [7, 4]
    assert tokenizer.decode(batch.response_ids[:7]) == "3+4=7\n#### 7<eos>"
    short, dropped = demonstrations(ROWS, tokenizer, PromptFormat(), "rows", max_response_tokens=4)
    assert len(short) == 1 and dropped == {"response too long": 1}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a\n#### 1,080", "1,080"),
        ("2", "2"),
        (27.0, "27"),
        (0.5, "0.5"),
        (["$3$"], "$3$"),
        ([1, 2], "1, 2"),
        (None, ""),
        ("infinity", "infinity"),
    ],
)
def test_reference_answers(value, expected):
    assert reference_answer(value) == expected


def test_a_tokenizer_too_large_for_the_model(tokenizer):
    check_tokenizer(tokenizer, arithmetic.VOCABULARY_SIZE, "m")
    with pytest.raises(DataError, match="ids go up to 226, but m has a vocabulary of 100"):
        check_tokenizer(tokenizer, 100, "m")
