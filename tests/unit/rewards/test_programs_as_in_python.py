"""Tests of a row work across two processes as in one process: changed arguments, objects, iterators, callbacks."""

import json
import time
from collections.abc import Iterator

import pytest

from megatron_rft.records import Prompt, Score
from megatron_rft.rewards.code import CodeReward
from megatron_rft.rewards.sandbox import runner
from tests.unit.rewards.test_sandbox import UNLIMITED, code_reward


@pytest.fixture(scope="module")
def reward() -> Iterator[CodeReward]:
    reward = code_reward(timeout_s=1.0, row_timeout_s=6.0, workers=2)
    yield reward
    reward.close()


def grade(reward: CodeReward, program: str, code: str, **more) -> Score:
    return reward([Prompt(0, (1,), "", json.dumps({"kind": "assert", "code": code} | more))], [program])[0]


RIGHT = {
    "a changed list": (
        "def rotate(x): x.append(x.pop(0))",
        "x = [1, 2, 3]\nrotate(x)\nassert x == [2, 3, 1]\ny = x\nrotate(y)\nassert x == [3, 1, 2] and x is y",
    ),
    "a changed part": (
        "def f(x):\n    x[0]['a'].add(3)\n    x[1].clear()",
        "inner = {'a': {1}}\nx = (inner, [1])\nf(x)\nassert inner == {'a': {1, 3}} and x == ({'a': {1, 3}}, [])",
    ),
    "a changed keyword argument": ("def f(x=None): x.append(1)", "a = []\nf(x=a)\nassert a == [1]"),
    "the program's own iterator": (
        "class Two:\n    def __init__(self): self.n = 0\n    def __iter__(self): return self\n"
        "    def __next__(self):\n        self.n += 1\n        if self.n > 2: raise StopIteration\n"
        "        return self.n\n    def left(self): return 2 - self.n",
        "two = Two()\nassert next(two) == 1 and two.left() == 1\nassert list(two) == [2] and list(Two()) == [1, 2]",
    ),
    "an iterator as an argument": (
        "def total(values): return sum(values)",
        "assert total(x for x in [1, 2]) == 3 and total(iter([1, 2])) == 3",
    ),
    "the same object": (
        "class Node:\n    def __init__(self): self.next = self\ndef first(node): return node.next",
        "node = Node()\nassert first(node) is node and node.next == node and isinstance(node, Node)\n"
        "assert Node() != node and not isinstance(3, Node)",
    ),
    "other types that change": (
        "def f(d, q, b):\n    d['k'] = d.pop('j')\n    q.rotate(1)\n    b.append(65)",
        "from collections import deque\nd, q, b = {'j': 1}, deque([1, 2]), bytearray(b'x')\nf(d, q, b)\n"
        "assert d == {'k': 1}\nassert q == deque([2, 1])\nassert b == bytearray(b'xA')",
    ),
    "the argument itself": ("def f(x):\n    x.sort()\n    return x", "x = [2, 1]\nassert f(x) is x and x == [1, 2]"),
    "a length": (
        "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n"
        "    def __len__(self): return len(self.items)\n    def __getitem__(self, k): return self.items[k]\n"
        "    def __str__(self): return 'Stack' + str(self.items)",
        "s = Stack()\ns.push(3)\ns.push(4)\nassert len(s) == 2 and s[1] == 4\nassert str(s) == 'Stack[3, 4]'\n"
        "assert list(s) == [3, 4] and 4 in s",
    ),
    "generators": (
        "def gen():\n    n = 0\n    while True:\n        yield n\n        n += 1\ndef three(): return iter([1, 2, 3])",
        "g = gen()\nassert next(g) == 0\nassert next(g) == 1\nfrom itertools import islice\n"
        "assert list(islice(g, 600)) == list(range(2, 602))\nassert sorted(three()) == [1, 2, 3]\n"
        "assert three() == [1, 2, 3]",
    ),
    "a generator that raises": (
        "def gen():\n    yield 1\n    yield 2\n    raise ValueError('end')",
        "got = []\ntry:\n    for x in gen(): got.append(x)\n    assert False\n"
        "except ValueError: pass\nassert got == [1, 2]",
    ),
    "a dataclass that names its own type": (
        "from dataclasses import dataclass\n@dataclass\nclass Node:\n    value: int\n    next: 'Node | None' = None\n"
        "def f(x): return Node(x, Node(1)).next.value",
        "assert f(2) == 1",
    ),
    "a callback": (
        "def apply(f, xs): return [f(x) for x in xs]\ndef twice(f): return lambda x: f(f(x))",
        "assert apply(lambda x: x + 1, [1, 2]) == [2, 3]\nassert twice(lambda x: 3 * x)(2) == 18\n"
        "assert apply(str, [1]) == ['1']",
    ),
    "a callback that calls the program": (
        "def visit(x, f): return f(x) + 1\ndef double(x): return 2 * x",
        "assert visit(5, lambda x: double(x)) == 11\nassert visit(5, double) == 11",
    ),
    "a callback that raises": (
        "def safe(f):\n    try: return f()\n    except KeyError: return 'no key'",
        "def bad(): return {}['x']\nassert safe(bad) == 'no key'",
    ),
    "a callback with a list": (
        "def collect(f):\n    for n in range(3): f(n)",
        "seen = []\ncollect(seen.append)\nassert seen == [0, 1, 2]",
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_it_works_as_in_python(name, reward):
    program, code = RIGHT[name]
    score = grade(reward, program, code)
    assert score.reward == 1.0 and score.error is None, score


def test_a_change_that_is_wrong_is_wrong(reward):
    score = grade(reward, "def rotate(x): x.reverse()", "x = [1, 2, 3]\nrotate(x)\nassert x == [2, 3, 1]")
    assert score.reward == -0.3 and "got [3, 2, 1], expected [2, 3, 1]" in score.reason


HUGE = {
    "a value": "def f(x): return 10**5000",
    "beyond what can be written": "def f(x): return 10**400000",
    "a key": "def f(x): return {10**5000: 1}",
    "in a list": "def f(x): return [[10**5000]]",
    "a decimal": "from decimal import Decimal\ndef f(x): return Decimal(10)**50000",
}


@pytest.mark.parametrize("name", HUGE)
def test_a_huge_number_is_a_wrong_answer_and_no_error_of_the_grader(name, reward):
    for tests in (
        {"kind": "call", "name": "f", "inputs": [[1]], "outputs": [{"1": 1}]},
        {"kind": "call", "name": "f", "inputs": [[1]], "outputs": [3]},
        {"kind": "assert", "code": "assert f(1) == 3"},
        {"kind": "assert", "code": "x = f(1)\ny = str(x)\nassert y == '3'"},
    ):
        (score,) = reward([Prompt(0, (1,), "", json.dumps(tests))], [HUGE[name]])
        assert score.error is None and score.reward == -0.3, (tests, score)


COLLIDE = "M = 2**61 - 1\ndef f(x): return {keys}(k * M for k in range(1, 300_000))"


@pytest.mark.parametrize("program", ["def f(x): return set(k * (2**61 - 1) for k in range(1, 4000))"])
def test_some_large_numbers_are_values(program, reward):
    assert grade(reward, program, "assert len(f(1)) == 3999").reward == 1.0


@pytest.mark.parametrize("keys", ["list", "tuple"])
def test_judging_has_a_limit_of_its_own(keys, reward):
    start = time.monotonic()
    score = grade(reward, COLLIDE.format(keys=keys), "assert set(f(1)) == {1}")
    assert score.error is None and score.reward < 0 and time.monotonic() - start < 300
    assert "numbers beyond" in score.reason


def test_a_limit_for_each_test_and_one_for_the_row(reward, monkeypatch):
    """Eight calls of 0.4 s fit 1 s per test and 6 s per row; 30 exceed the row's limit, 2 s exceed a test's. The calls
    read the clock of the limits, whose ticks differ from the process's own seconds on a busy machine."""
    monkeypatch.setattr(runner, "MAX_WAIT_FACTOR", UNLIMITED)
    busy = "import signal\ndef left(): return signal.getitimer(signal.ITIMER_PROF)[0]\n"
    busy += "def f(s):\n    end = left() - s\n    while left() > end: pass\n    return 1"
    assert grade(reward, busy, "for _ in range(8): assert f(0.4) == 1").reward == 1.0
    row = grade(reward, busy, "for _ in range(30): assert f(0.4) == 1")
    assert row.details["tier"] == "time-out" and "not all tests ended within 6 s" in row.reason
    one = grade(reward, busy, "assert f(0) == 1\nassert f(2) == 1")
    assert one.details == {"tier": "time-out", "tests": [True]} and "no result within 1 s" in one.reason
    sleeps = grade(reward, "import time\ndef f(s): time.sleep(60)", "assert f(0) == 1")
    assert sleeps.details["tier"] == "time-out"
    power = grade(reward, "def f(s): return 9**9**9", "assert f(0) == 1")
    assert power.details["tier"] == "time-out"
    table = {"kind": "stdin", "inputs": ["0.1"] * 100, "outputs": ["1"] * 100}
    script = "import time\nend = time.process_time() + float(input())\nwhile time.process_time() < end: pass\nprint(1)"
    (score,) = reward([Prompt(0, (1,), "", json.dumps(table))], [script])
    assert score.details["tier"] == "time-out" and "not all tests ended within 6 s" in score.reason


def test_a_type_that_the_tests_do_not_expect_is_a_wrong_answer(reward):
    score = grade(reward, "def f(x): return 'text'", "total = sum(x for x in f(3))\nassert total == 6")
    assert score.error is None and score.reward == -0.3
