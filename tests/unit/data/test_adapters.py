"""Each adapter on rows made for the test, with the field names of the published set; test_real_rows has real ones."""

import base64
import json
import pickle
import zlib

import pytest

from megatron_rft.data.adapters.mathematics import last_box
from megatron_rft.data.rows import load_rows
from megatron_rft.utils.errors import DataError


@pytest.fixture
def adapt(tmp_path):
    """The row that an adapter makes of one raw row, read from a file."""

    def one(adapter: str, name: str = "rows.jsonl", **row):
        path = tmp_path / name
        path.write_text(json.dumps(row) + "\n")
        return load_rows(path, adapter=adapter)[0]

    return one


class TestMathematics:
    def test_gsm8k_keeps_the_worked_solution_without_calculator_marks(self, adapt):
        row = adapt("gsm8k", question="Two and two?", answer="2 + 2 = <<2+2=4>>4.\n#### 1,004")
        assert row == {"question": "Two and two?", "answer": "1,004", "solution": "2 + 2 = 4.\n#### 1,004"}

    def test_math_takes_the_last_box_of_several(self, adapt):
        solution = r"First \boxed{3}, and so \boxed{\frac{1}{2}}."
        row = adapt("math", problem="?", level="Level 5", type="Algebra", solution=solution)
        assert (row["answer"], row["level"], row["subject"], row["solution"]) == (
            r"\frac{1}{2}",
            "5",
            "Algebra",
            solution,
        )

    def test_math500_and_math_perturb_give_the_answer_themselves(self, adapt):
        row = adapt("math500", problem="?", solution="so 7", answer="7", subject="Geometry", level=2, unique_id="t/1")
        assert row == {
            "question": "?",
            "answer": "7",
            "solution": "so 7",
            "subject": "Geometry",
            "level": "2",
            "id": "t/1",
        }
        assert adapt("math_perturb", problem="?", answer=8, type="Algebra", problem_id="9")["id"] == "9"

    def test_math_as_verl_has_it(self, adapt):
        suffix = " Let's think step by step and output the final answer within \\boxed{}."
        common = dict(level="Level 1", type="Algebra", data_source="x", ability="math", extra_info={"index": 0})
        row = adapt("math", problem="Why?" + suffix, solution="0", reward_model={"ground_truth": "0"}, **common)
        assert row == {"question": "Why?", "answer": "0", "level": "1", "subject": "Algebra"}  # "0" is no solution
        assert adapt("math", problem="?", solution="", reward_model={"ground_truth": ""}, **common)["answer"] == ""

    @pytest.mark.parametrize(
        ("adapter", "answer", "text"), [("amc23", 27.0, "27"), ("aime25", 70, "70"), ("aime24", "025", "025")]
    )
    def test_contest_answers_are_floats_integers_and_text(self, adapt, adapter, answer, text):
        assert adapt(adapter, id=0, question="?", answer=answer) == {"question": "?", "answer": text, "id": "0"}

    def test_contest_answers_in_a_box_alone_and_prompts_with_an_instruction(self, adapt):
        assert adapt("aime24", problem="?", solution=r"so $\framebox{204}$ minutes")["answer"] == "204"
        prompt = "How many?\nPlease reason step by step, and put your final answer within \\boxed{}."
        assert adapt("aime25", prompt=prompt, answer=3)["question"] == "How many?"

    def test_minerva_and_gaokao(self, adapt):
        row = adapt("minerva", problem="?", solution=r"\boxed{2.5e3} J", type="Physics", idx=4)
        assert (row["answer"], row["subject"], row["id"]) == ("2.5e3", "Physics", "4")
        assert adapt("gaokao2023en", question="?", answer="$145$solution:", lang="en")["answer"] == "$145$"
        assert adapt("gaokao2023en", question="?", answer="")["answer"] == ""

    def test_olympiadbench_holds_several_answers_and_solutions(self, adapt):
        common = dict(
            id=1, subfield="Algebra", question="Which?", answer_type="Numerical", unit=None, is_multiple_answer=True
        )
        row = adapt("olympiadbench", context="Let x.", solution=["One.", "Two."], final_answer=["$3$,$7$"], **common)
        assert row["question"] == "Let x.\n\nWhich?" and row["answer"] == "$3$,$7$"
        assert row["solution"] == "One.\n\nTwo." and row["subject"] == "Algebra" and "unit" not in row
        assert adapt("olympiadbench", context=None, solution=[], final_answer=["1", "2"], **common)["answer"] == "1, 2"

    @pytest.mark.parametrize(
        ("text", "box"),
        [
            (r"\boxed{a{b}c} \boxed{{x}", "a{b}c"),  # the last one is not closed
            (r"\boxed 4$.", "4"),
            (r"\fbox {2}", "2"),
            ("none", None),
        ],
    )
    def test_boxes(self, text, box):
        assert last_box(text) == box


class TestCode:
    def test_humaneval(self, adapt):
        prompt = 'from math import pi\n\ndef help(x):\n    return x\n\ndef area(r):\n    """Of a circle."""\n'
        test = "def check(candidate):\n    assert candidate(0) == 0\n"
        row = adapt(
            "humaneval",
            task_id="H/0",
            prompt=prompt,
            entry_point="area",
            canonical_solution="    return pi*r*r\n",
            test=test,
        )
        assert row["tests"] == {
            "kind": "assert",
            "code": test + "\ncheck(area)",
            "names": ["area"],
            "preamble": "from math import pi\n\ndef help(x):\n    return x",
        }
        scope = {}
        exec(row["solution"], scope)
        assert scope["area"](0) == 0 and row["answer"] == "" and prompt.strip() in row["question"]

    def test_mbpp_in_its_editions(self, adapt):
        tests = ["assert two() == 2", "assert two() < 3"]
        full = adapt(
            "mbpp",
            text="Give two.",
            code="def two(): return 2",
            task_id=1,
            test_list=tests,
            test_setup_code="import os",
            challenge_test_list=[],
        )
        assert full["tests"] == {"kind": "assert", "code": "\n".join(tests), "setup": "import os", "names": ["two"]}
        assert (
            "assert two() < 3" in full["question"] and full["solution"] == "def two(): return 2" and full["id"] == "1"
        )
        plus = adapt(
            "mbpp_plus",
            prompt="Give two.",
            code="",
            task_id=2,
            test_list=tests,
            test_imports=["import re"],
            test="assert x()",
        )
        assert (
            plus["tests"] == {"kind": "assert", "code": "assert x()", "setup": "import re"} and "solution" not in plus
        )
        assert "unusable" in adapt("mbpp", text="?", code="", task_id=3, test_list=[])

    def test_apps_and_taco(self, adapt):
        row = adapt(
            "apps",
            problem_id=7,
            question="Add.",
            solutions=json.dumps(["", "print(3)"]),
            difficulty="interview",
            input_output=json.dumps({"inputs": ["1 2\n"], "outputs": ["3\n"]}),
            starter_code="",
        )
        assert row["tests"] == {"kind": "stdin", "inputs": ["1 2\n"], "outputs": ["3\n"]}
        assert (row["level"], row["solution"], row["id"]) == ("interview", "print(3)", "7")
        assert "standard input" in row["question"]
        lines = {"inputs": [["1", "2"]], "outputs": [["3"]]}
        assert adapt("taco", question="?", input_output=json.dumps(lines))["tests"] == lines | {"kind": "stdin"}

    def test_apps_calls_with_values_wrapped_or_not(self, adapt):
        starter = "class Solution:\n    def f(self, x: List[int]):\n        "
        for outputs, values in (([[False], [True]], [False, True]), ([9, 8], [9, 8]), ([[1], [1, 2]], [[1], [1, 2]])):
            tests = json.dumps({"fn_name": "f", "inputs": [[[1]], [[2]]], "outputs": outputs})
            row = adapt("apps", question="?", input_output=tests, starter_code=starter)
            assert row["tests"]["outputs"] == values and row["tests"]["name"] == "f"
            assert "from typing import *" in row["tests"]["preamble"] and "def f(self" in row["question"]

    @pytest.mark.parametrize(
        "tests", ["", "{}", '{"inputs": [], "outputs": []}', '{"inputs": [' + "9" * 5000 + '], "outputs": [1]}']
    )
    def test_apps_without_usable_tests_is_left_out(self, adapt, tests):
        assert adapt("apps", question="?", solutions="", input_output=tests) == {"unusable": "no tests that can be run"}

    def test_livecodebench(self, adapt):
        public = json.dumps([{"input": "[1, 2]\n3", "output": "6", "testtype": "functional"}])
        hidden = [{"input": "[]\n1", "output": "1", "testtype": "functional"}]
        packed = base64.b64encode(zlib.compress(pickle.dumps(json.dumps(hidden)))).decode()
        about = dict(
            question_content="Sum.", platform="leetcode", difficulty="easy", question_id="q", contest_date="2025-01-01"
        )
        row = adapt(
            "livecodebench",
            public_test_cases=public,
            private_test_cases=packed,
            starter_code="class S:",
            metadata='{"func_name": "total"}',
            **about,
        )
        assert row["tests"]["inputs"] == [[[1, 2], 3], [[], 1]] and row["tests"]["outputs"] == [6, 1]
        assert (row["tests"]["name"], row["level"], row["subject"]) == ("total", "easy", "leetcode")
        stdin = json.dumps([{"input": "1", "output": "2", "testtype": "stdin"}])
        row = adapt(
            "livecodebench", public_test_cases=stdin, private_test_cases=stdin, metadata="{}", starter_code="", **about
        )
        assert row["tests"] == {"kind": "stdin", "inputs": ["1", "1"], "outputs": ["2", "2"]}

    def test_a_pickle_of_anything_but_text_is_refused(self, adapt, tmp_path):
        class Evil:
            def __reduce__(self):
                return (open, (str(tmp_path / "escaped"), "w"))

        packed = base64.b64encode(zlib.compress(pickle.dumps(Evil()))).decode()
        with pytest.raises(DataError, match="private_test_cases cannot be decoded .it holds more than text"):
            adapt("livecodebench", question_content="?", public_test_cases="[]", private_test_cases=packed)
        assert not (tmp_path / "escaped").exists()


CALL = {"name": "look", "parameters": {"at": "sky"}}


class TestTools:
    def test_rlla_for_reinforcement_and_for_sft(self, adapt):
        gold = f"<think> Look. </think>\n<tool_call>\n{json.dumps(CALL)}\n</tool_call>"
        messages = [{"role": "system", "content": "Tools: look."}, {"role": "user", "content": "What is up?"}]
        rl = adapt("rlla", data_source="rlla", prompt=messages, reward_model={"ground_truth": gold, "style": "rule"})
        assert rl == {"question": "What is up?", "answer": gold, "history": messages[:1]}
        sft = adapt("rlla", instruction="Tools: look.", input="What is up?", output=gold)
        assert sft == rl | {"solution": gold}

    def test_api_bank_answers_are_a_dict_or_a_list_of_one(self, adapt):
        for name, answer in (("level-2-api.jsonl", CALL), ("level-1-api.jsonl", [CALL])):
            row = adapt("api_bank", name=name, system="Tools.", user="Up?", answer=answer, other={"id": 0})
            assert json.loads(row["answer"]) == [CALL] and row["level"] == name[6]

    def test_api_bank_as_published(self, adapt):
        output = "API-Request: [Add(name='Jo', count=2), Stop()]"
        row = adapt("api_bank", instruction="Make a request.", input="User: add Jo", expected_output=output)
        assert json.loads(row["answer"]) == [
            {"name": "Add", "parameters": {"name": "Jo", "count": 2}},
            {"name": "Stop", "parameters": {}},
        ]
        assert "unusable" in adapt("api_bank", instruction="Reply.", input="User: hi", output="Hello.")
        with pytest.raises(DataError, match="its calls cannot be read"):
            adapt("api_bank", instruction="", input="", output="API-Request: [open(__file__)()+1]")

    def test_a_raw_dialogue_says_what_to_convert(self, adapt):
        row = adapt("api_bank", turns=[{"role": "User", "text": "?"}], file="x", level_dir="y")
        assert "level-*-api.json, or convert it to rows of system (with the tools), user and answer" in row["unusable"]


class TestText:
    def test_sciknoweval_as_published(self, adapt):
        row = adapt(
            "sciknoweval",
            question="Which?",
            choices={"text": ["H", "O"], "label": ["A", "B"]},
            answerKey="B",
            type="mcq-2-choices",
            domain="Chemistry",
            details={"level": "L3", "task": "t", "subtask": "s"},
        )
        assert row["question"] == "Which?\n\nA: H\nB: O\nPlease reason step by step."
        assert (row["answer"], row["choices"], row["subject"], row["level"]) == (
            "B",
            {"A": "H", "B": "O"},
            "Chemistry",
            "L3",
        )
        open_ended = adapt("sciknoweval", question="?", choices={"text": [], "label": []}, answerKey="", answer="long")
        assert open_ended == {"unusable": "not a multiple choice"}

    def test_sciknoweval_as_prepared_for_sdpo(self, adapt):
        prompt = "Which?\n\nA: H, as in\nwater\n\nB: O\nPlease reason step by step."
        row = adapt(
            "sciknoweval", name="physics_test.jsonl", idx=3, kind="mcq", answer="A", prompt=prompt, system="Choose."
        )
        assert row["choices"] == {"A": "H, as in\nwater", "B": "O"} and row["subject"] == "physics"
        assert row["history"] == [{"role": "system", "content": "Choose."}] and row["question"] == prompt

    def test_prompt_collection(self, adapt):
        turns = [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Yes?"},
            {"role": "user", "content": "Sing."},
        ]
        row = adapt("prompt_collection", dataset="Capybara", context="...", context_messages=turns, id="1")
        assert row == {"question": "Sing.", "answer": "", "history": turns[:2], "subject": "Capybara", "id": "1"}
        assert adapt("prompt_collection", context="Sing.")["question"] == "Sing."
        assert "the assistant's" in adapt("prompt_collection", context_messages=turns[:2])["unusable"]
        with pytest.raises(DataError, match="do not end with the user's turn"):
            adapt("prompt_collection", context_messages=[{"role": "system", "content": "Sing."}])


class TestBadRows:
    @pytest.mark.parametrize(
        ("adapter", "row", "message"),
        [
            (
                "gsm8k",
                {"Q": "?", "answer": "#### 1"},
                "no field 'problem' or 'question' or 'prompt'; it has 'Q', 'answer'",
            ),
            ("gsm8k", {"question": "?", "answer": "no mark"}, "does not end with '#### NUMBER': 'no mark'"),
            ("gsm8k", {"question": "?", "answer": 3}, "answer is not text but int: 3"),
            ("math", {"problem": "?", "solution": "no box"}, "no answer, and no .boxed in the solution: 'no box'"),
            (
                "math",
                {"problem": "?", "reward_model": {"style": 1}},
                "no field 'reward_model.ground_truth'; it has 'style'",
            ),
            ("math", {"problem": "?", "reward_model": "{"}, "reward_model is not JSON"),
            (
                "olympiadbench",
                {"question": "?", "final_answer": ["1"], "solution": {"a": 1}},
                "solution is not a list but dict",
            ),
            ("rlla", {"prompt": [{"content": "x"}], "reward_model": {}}, "a message has a role and a content"),
            ("api_bank", {"system": "", "user": "?", "answer": [{"name": "f"}]}, "a call has a name and parameters"),
        ],
    )
    def test_what_is_wrong_where(self, tmp_path, adapter, row, message):
        path = tmp_path / "rows.jsonl"
        path.write_text(json.dumps(row) + "\n")
        with pytest.raises(DataError, match=rf"rows\.jsonl:1 \(adapter {adapter}\): .*{message}"):
            load_rows(path, adapter=adapter)

    def test_rows_of_a_list_and_of_parquet_are_numbered(self, tmp_path):
        import pyarrow
        import pyarrow.parquet

        rows = [{"question": "1?", "answer": "#### 1"}, {"question": "2?", "answer": "2"}]
        (tmp_path / "a.json").write_text(json.dumps(rows))
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
        for name in ("a.json", "a.parquet"):
            with pytest.raises(DataError, match=rf"{name}, row 2 \(adapter gsm8k\)"):
                load_rows(tmp_path / name, adapter="gsm8k")

    def test_minus_infinity_in_a_row_is_a_number_but_no_answer(self, tmp_path, adapt):
        (tmp_path / "a.jsonl").write_text('{"x": -Infinity}\n')
        assert load_rows(tmp_path / "a.jsonl") == [{"x": float("-inf")}]
        with pytest.raises(DataError, match=r"\(is -Infinity, not text or a finite number\)"):
            adapt("amc23", problem="?", answer=float("-inf"))


@pytest.mark.parametrize(
    ("adapter", "row", "message"),
    [
        (
            "sciknoweval",
            {"question": "?", "choices": {"label": ["A", "B"], "text": ["x"]}, "answerKey": "A"},
            "its choices have 2 labels and 1 texts",
        ),
        (
            "sciknoweval",
            {"question": "?", "choices": {"label": ["A", "B"], "text": ["x", None]}, "answerKey": "A"},
            "a value of choices.text is null, not text or a number",
        ),
        (
            "sciknoweval",
            {"question": "?", "choices": {"label": ["A", ["B"]], "text": ["x", 1]}, "answerKey": "A"},
            "a value of choices.label is a list, not text or a number: ..B",
        ),
        (
            "livecodebench",
            {"question_content": "?", "public_test_cases": '[{"input": "1", '},
            "public_test_cases is not JSON",
        ),
        ("math500", {"problem": "?", "answer": {"value": 1}}, "is an object, not text or a number"),
        ("aime25", {"problem": "?", "answer": float("nan")}, "is NaN"),
        ("math", {"problem": "?", "reward_model": '{"ground_truth": "\\ud83d"}'}, r"half of a character, \\ud83d"),
        ("gsm8k", {"question": "?", "answer": float("nan")}, "answer is not a number but float: nan"),
        ("apps", {"question": "?", "input_output": '{"inputs": ["1"], "outputs": 3}'}, None),  # unusable, and counted
    ],
)
def test_rows_that_an_adapter_cannot_read_are_named(adapt, adapter, row, message):
    if message is None:
        assert adapt(adapter, **row) == {"unusable": "no tests that can be run"}
        return
    with pytest.raises(DataError, match=rf"rows\.jsonl:1 \(adapter {adapter}\): .*{message}") as told:
        adapt(adapter, **row)
    assert "\n" not in str(told.value)


def test_any_error_of_an_adapter_is_one_sentence(adapt):
    with pytest.raises(DataError, match=r"rows\.jsonl:1 \(adapter mbpp\): a field is not what this data set has there"):
        adapt("mbpp", task_id=1, text="?", test_list=["assert f()"], test_imports=[1], code="def f(): pass")


class TestProgramsOfOtherSets:
    @pytest.mark.parametrize("code", ["x = 1", "assert True", "print(f(1))", "def check(f): f(1)", "assert ("])
    def test_tests_without_an_assertion_are_left_out(self, adapt, code):
        row = adapt("mbpp", task_id=1, text="?", code="def f(x): pass", test_list=[code], test_setup_code="")
        assert row == {"unusable": "no assertion among the tests"}
        row = adapt(
            "humaneval", task_id="1", prompt="def f(x):\n", canonical_solution=" pass", entry_point="f", test=code
        )
        assert row == {"unusable": "no assertion among the tests"}
