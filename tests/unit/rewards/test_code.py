import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_rft.data.adapters import ADAPTERS
from megatron_rft.data.fields import Fields
from megatron_rft.records import Prompt, Score
from megatron_rft.rewards.code import CodeReward, extract_code, same_output
from megatron_rft.rewards.sandbox import runner
from tests.unit.rewards.test_sandbox import UNLIMITED, code_reward


@pytest.fixture(scope="module")
def reward() -> Iterator[CodeReward]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "MAX_WAIT_FACTOR", UNLIMITED)
        reward = code_reward(timeout_s=1.0, workers=2, row_timeout_s=10.0)
        yield reward
        reward.close()


def grade(reward: CodeReward, tests: dict, *programs: str) -> list[Score]:
    prompt = Prompt(0, (1,), "", json.dumps(tests))
    return reward([prompt] * len(programs), list(programs))


SQUARES = {"kind": "stdin", "inputs": ["2\n", "3\n", "4\n"], "outputs": ["4\n", "9\n", "16\n"]}


def test_the_tiers_of_scripts(reward):
    right, one, none, broken, raises, loops, quits = grade(
        reward,
        SQUARES,
        "print(int(input()) ** 2)",
        "print(2 * int(input()))",
        "print('no')",
        "print(",
        "n = int(input())\nprint(n ** 2 if n < 4 else n / 0)",
        "while True: pass",
        "exit(3)",
    )
    assert right.reward == 1.0 and right.correct
    assert one.reward == pytest.approx(-0.3 + 1.3 / 3) and one.details["tests"] == [True, False, False]
    assert "2 of 3 tests failed" in one.reason and "expected output:\n9\noutput:\n6" in one.reason
    assert none.reward == -0.3
    assert broken.reward == -1.0 and "SyntaxError: '(' was never closed" in broken.reason
    assert raises.reward == -0.6 and raises.details["tests"] == [True, True]
    assert "ZeroDivisionError" in raises.reason and "line 2" in raises.reason and "input:\n4" in raises.reason
    assert loops.reward == -0.6 and loops.details["tier"] == "time-out" and "within 1 s" in loops.reason
    assert quits.reward == -0.6 and "exit status 3" in quits.reason
    assert not any(score.correct for score in (one, none, broken, raises, loops, quits))


def test_no_program_does_not_compile(reward):
    scores = grade(reward, SQUARES, "", "```python\n\n```", "<think>It is")
    assert [(each.reward, each.reason) for each in scores] == [
        (-1.0, "does not compile: the response has no program")
    ] * 3


def test_calls(reward):
    tests = {"kind": "call", "name": "div", "inputs": [[6, 3], [1, 3], [0, 1]], "outputs": [[2], [0.3333333], [0]]}
    right, wrong, method, raises, none = grade(
        reward,
        tests,
        "def div(a, b): return (a / b,)",  # a tuple is a list, and 0.0 is 0, in JSON
        "def div(a, b): return [a // b]",
        "class Solution:\n    def div(self, a, b): return [a / b]",
        "def div(a, b): return [b / a]",
        "def mul(a, b): return [a * b]",
    )
    assert right.reward == method.reward == 1.0
    assert wrong.reward == pytest.approx(-0.3 + 1.3 * 2 / 3)
    assert "div(1, 3)\ngot [0], expected [0.3333333]" in wrong.reason
    assert raises.reward == none.reward == -0.6 and "NameError: name 'div' is not defined" in none.reason


def test_asserts(reward):
    code = "assert f(2) == 4\nassert abs(f(3) - 9) < 1e-6\nassert True\nfor n in range(3): assert f(n) >= 0, n"
    right, one, none, text = grade(
        reward,
        {"kind": "assert", "code": code},
        "def f(n): return n * n",
        "def f(n): return -(n * n) if n == 2 else 9",
        "def f(n): pass",
        "def f(n): return str(n * n)",
    )
    assert right.reward == 1.0 and len(right.details["tests"]) == 3  # `assert True` is no test
    assert one.reward == pytest.approx(-0.3 + 1.3 / 3) and "f(2) == 4\ngot -4, expected 4" in one.reason
    assert none.reward == text.reward == -0.3  # the wrong type is a wrong answer


EVALPLUS = """import numpy as np

def is_floats(x) -> bool:
    if isinstance(x, (list, tuple)):
        return all(isinstance(i, float) for i in x)
    if isinstance(x, np.ndarray):
        return x.dtype == np.float64 or x.dtype == np.float32
    return isinstance(x, float)

def assertion(out, exp, atol):
    if atol == 0 and is_floats(exp):
        atol = 1e-6
    if out != exp and atol != 0:
        {compared}
    else:
        assert out == exp, f"out: {{out}}, exp: {{exp}}"

inputs = [[[1, 2]], [[3]]]
results = [[0.5, 1.0], [1.5]]
for i, (inp, exp) in enumerate(zip(inputs, results)):
    assertion(sum(*inp), exp, 0)
"""


@pytest.mark.parametrize(
    "compared",
    ["assert np.allclose(out, exp, rtol=1e-07, atol=atol)", "np.testing.assert_allclose(out, exp, atol=atol)"],
)
def test_mbpp_plus_as_on_the_hub(reward, compared):
    """Its tests use numpy, and one task's function has the name of Python's sum."""
    code = "def sum(xs): return [x / 2 for x in xs]"
    row = dict(task_id=1, prompt="Halve.", code=code, test_list=["assert sum([1]) == [0.5]"], test_imports=[])
    fields = Fields(row | {"test": EVALPLUS.format(compared=compared)}, "row 1", Path("test.parquet"))
    right, close, half, wrong = grade(
        reward,
        ADAPTERS["mbpp_plus"](fields)["tests"],
        code,
        "def sum(xs): return [x / 2 + 1e-9 for x in xs]",
        "def sum(xs): return [0.5, 1.0]",
        "def sum(xs): return None",
    )
    assert right.reward == close.reward == 1.0
    assert half.reward == pytest.approx(-0.3 + 1.3 / 2) and wrong.reward == -0.3


def test_long_integers_in_tests(reward):
    digits = "9" * 5000
    (score,) = grade(reward, {"kind": "assert", "code": f"assert f() == {digits}"}, "def f(): return 10**5000 - 1")
    assert score.reward == 1.0


def test_expected_exceptions_objects_and_helpers(reward):
    tests = {
        "kind": "assert",
        "preamble": "from math import sqrt",  # the prompt's, for the program
        "setup": "def near(a, b): return abs(a - b) < 0.1",
        "code": "try:\n    root(-1)\n    assert False\nexcept ValueError: pass\n"
        "assert near(root(4), 2)\nn = Node(3)\nn.next = Node(4)\nassert n.next.value == 4\nassert total(n) == 7",
    }
    program = (
        "def near(a, b): return True\ndef root(x): return sqrt(x)\n"
        "class Node:\n    def __init__(self, value): self.value, self.next = value, None\n"
        "def total(node): return node.value + (total(node.next) if node.next else 0)"
    )
    right, cheat = grade(reward, tests, program, program.replace("sqrt(x)", "sqrt(x) + 1"))
    assert right.reward == 1.0, right
    assert cheat.reward < 1.0 and "near" in cheat.reason  # `near` is the tests' own


def test_values_keep_their_types(reward):
    values = "(1, [2], {3: {4}}, b'5', 10**30, 1j, None, frozenset([6]), 'x', True, 2.5)"
    code = f"assert f(*{values}) == {values}\nassert g() == [0, 1] and h() == (1,) and h() != [1]"
    program = "def f(*a): return a\ndef g(): return (i for i in range(2))\ndef h(): return (1,)"
    assert grade(reward, {"kind": "assert", "code": code}, program)[0].reward == 1.0


def test_a_row_without_usable_tests_is_an_error_and_no_reward(reward):
    for tests, problem in [
        ({"kind": "stdin", "inputs": [], "outputs": []}, "0 inputs"),
        ({"kind": "shell"}, "cannot be read"),
        ([{"kind": "stdin"}], "cannot be read"),
        ({"kind": "stdin", "inputs": "2\n", "outputs": "4\n"}, "inputs of the row's tests must be a list: '2\\n'"),
        ({"kind": "stdin", "inputs": ["2"], "outputs": 5}, "outputs of the row's tests must be a list: 5"),
        ({"kind": "call", "name": 5, "inputs": [[2]], "outputs": [4]}, "name of the row's tests must be a str: 5"),
        ({"kind": "call", "name": "f"}, "lack inputs, outputs"),
        ({"kind": "assert", "code": "assert ("}, "no Python"),
        ({"kind": "assert", "code": "x = 1"}, "no test"),
        ({"kind": "assert", "code": "raise KeyError"}, "the tests raise KeyError"),
    ]:
        (score,) = grade(reward, tests, "def f(): return 1")
        assert problem in score.error, (tests, score)


def test_fields_of_a_column_of_tables_may_be_null(reward):
    tests = {"kind": "stdin", "inputs": ["2"], "outputs": ["2"], "name": None, "names": None, "code": None}
    assert grade(reward, tests, "print(input())")[0].reward == 1.0


def test_equal_programs_run_once(reward):
    tests = {"kind": "stdin", "inputs": [""], "outputs": ["1"]}
    programs = [f"print({n % 2})" for n in range(20)]
    assert [score.reward for score in grade(reward, tests, *programs)] == [-0.3, 1.0] * 10


def test_the_field_of_the_row_comes_first(reward):
    prompt = Prompt(0, (1,), "", "a reference solution", {"tests": SQUARES})
    assert reward([prompt], ["print(int(input()) ** 2)"])[0].reward == 1.0


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\na\n```\nthen\n```py\nb\n```", "b\n"),
        ("```python\na\n```\noutput:\n```text\n7\n```", "a\n"),
        ("```\na\n```", "a\n"),
        ("```python\na", "a"),  # cut off
        ("print(1)", "print(1)"),
        ("<think>```python\nx\n```</think>print(1)", "print(1)"),
        ("<think>```python\nx\n```", ""),  # a thought that does not end
        ("```python\na\n```\nOutput:\n```\n7\n```", "a\n"),  # a tagged block beats an untagged one
        ("1. First\n\n   ```python\n   if a:\n       b\n   ```\n", "if a:\n    b\n"),
        ("~~~python\na\n~~~", "a\n"),
        ("~~~~\na\n~~~~\nOutput", "a\n"),
        ("> ```python\n> a = 1\n> ```", "a = 1\n"),
        (">\t```python\n>\ta = 1\n>\t```\nx", "a = 1\n"),
        ("Here it is: ```python\na\n```", "a\n"),
        ("```python\ns = '```'\nprint(s)\n```", "s = '```'\nprint(s)\n"),
        ('```python\ns = """\n```\nx\n```\n"""\nprint(s)\n```\nDone.', 's = """\n```\nx\n```\n"""\nprint(s)\n'),
        ("````python\ns = 1\n```\n````", "s = 1\n```\n"),
        ("```javascript\nlet a\n```\n```\na\n```", "a\n"),
        ("Use ``x`` and `y`:\nprint(1)", "Use ``x`` and `y`:\nprint(1)"),
    ],
)
def test_the_code_of_a_response(text, code):
    assert extract_code(text) == code


def test_a_program_in_a_thought_that_the_chat_template_has_opened_and_lines_of_a_row(reward):
    """Inputs and outputs may be lists of lines."""
    tests = {"kind": "stdin", "inputs": [["1", "2"]], "outputs": [["2", "1"]]}
    opened = Prompt(0, (1,), "", json.dumps(tests), opened=True)
    program = "```python\na, b = input(), input()\nprint(b, a, sep='\\n')\n```"
    assert [score.reward for score in reward([opened] * 2, [program, f"Hm.</think>{program}"])] == [-1.0, 1.0]


def test_the_block_that_defines_what_is_tested(reward):
    text = "```python\ndef f(x):\n    return x + 1\n```\nExample:\n```python\nprint(f(1))\n```"
    assert extract_code(text, ["f"]) == "def f(x):\n    return x + 1\n"
    assert extract_code(text, ["g"]) == extract_code(text) == "print(f(1))\n"
    for tests in (
        {"kind": "call", "name": "f", "inputs": [[1]], "outputs": [2]},
        {"kind": "assert", "code": "assert f(1) == 2", "names": ["f"]},
    ):
        assert [score.reward for score in grade(reward, tests, text)] == [1.0]


@pytest.mark.parametrize(
    ("got", "expected", "same"),
    [
        ("1 2\n", "1 2", True),
        ("1 2 \n\n", "1 2\n", True),
        ("1\n2", "1 2", False),
        ("0.3333333", "0.33333333", True),
        ("0.33", "0.33333333", False),
        ("1000000", "1000001", False),  # whole numbers are exact
        ("nan", "1.0", False),
        ("0.5", "0.5 1.5", False),
        ("", "1", False),
    ],
)
def test_outputs(got, expected, same):
    assert same_output(got, expected) is same


def test_an_assert_in_a_loop_is_one_test(reward):
    tests = {"kind": "assert", "code": "for k in f():\n    assert k < 999\nassert f() == [1000]"}
    (score,) = grade(reward, tests, "def f(): return list(range(1001))")
    assert score.reward == -0.3 and score.details["tests"] == [False, False]
    (score,) = grade(reward, tests, "def f(): return list(range(998))")
    assert score.reward == pytest.approx(-0.3 + 1.3 / 2)
    (score,) = grade(reward, {"kind": "assert", "code": "for k in f():\n    assert k"}, "def f(): return []")
    assert (score.reward, score.error) == (-0.3, None) and "no assert of the tests ran" in score.reason


def test_a_float_is_no_integer_by_rounding(reward):
    tests = {"kind": "call", "name": "f", "inputs": [[0]], "outputs": [1000000007]}
    assert [s.reward for s in grade(reward, tests, "def f(x): return 1e9", "def f(x): return 1000000007.0")] == [
        -0.3,
        1,
    ]


def test_types_and_json_keys_are_passed(reward):
    tests = {"kind": "assert", "code": "assert f(int)\nassert f(str) is False"}
    assert grade(reward, tests, "def f(kind): return isinstance(1, kind)")[0].reward == 1.0
    tests = {"kind": "call", "name": "f", "inputs": [[]], "outputs": [{"false": 1, "null": 2, "3": 4}]}
    assert grade(reward, tests, "def f(): return {False: 1, None: 2, 3: 4}")[0].reward == 1.0


def test_a_response_that_breaks_the_tests_is_wrong_and_no_error(reward):
    tests = {"kind": "assert", "code": "assert g(f(), f()) == 1"}
    program = "def f(): return 'ab' * 5_000_000\ndef g(x, y): return 1\n"
    forged = "import os, struct\nos.write(4, struct.pack('!I', 15 << 20) + b'[' * (15 << 20))\ndef f(): return 1\n"
    large, early = grade(reward, tests, program, forged)
    assert large.error is None and early.error is None and max(large.reward, early.reward) < 1
