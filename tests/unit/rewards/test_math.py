import os
import signal
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from megatron_rft.config.rewards import Reward
from megatron_rft.records import Prompt, Score
from megatron_rft.rewards.answers import compare_exactly
from megatron_rft.rewards.equivalence.algebra import endless
from megatron_rft.rewards.equivalence.worker import judge
from megatron_rft.rewards.math import TOO_LONG, MathReward, _graded
from megatron_rft.rewards.registry import build
from megatron_rft.utils.errors import ConfigError


def prompts(*answers: str) -> list[Prompt]:
    return [Prompt(index, (1,), "", answer) for index, answer in enumerate(answers)]


@pytest.fixture(scope="module")
def reward():
    reward = MathReward(timeout_s=20.0, workers=1)
    yield reward
    reward.close()


CASES = [
    ("1/2", r"so \boxed{0.5}", 1),
    (r"\frac{1}{2}", "#### 0.5", 1),
    (r"\frac{1}{2}", "#### 0.25", 0),
    ("[0,1)", r"\boxed{[0, 1)}", 1),
    ("[0,1)", r"\boxed{(0, 1)}", 0),
    ("2, 3", r"\boxed{3, 2}", 1),  # several values, in any order
    ("2, 3", r"\boxed{2}", 0),
    ("1,234", "#### $1234 dollars", 1),
    ("10", "The answer is 10.", 1),  # unmarked: the last number
    ("10", "First 10, then 11.", 0),
    ("11", "First 10, then 11.", 0),  # a number, but nothing says that it is the answer
    (r"2\sqrt{3}", r"\boxed{\sqrt{12}}", 1),
    ("Paris", r"\boxed{Pairs}", 0),
    ("3x+1", r"\boxed{1+3x}", 1),
    ("4.5e33", r"\boxed{4.5 \times 10^{33}}", 1),  # as Minerva has it
    ("1000", r"\boxed{1e3}", 1),
    ("2e", r"\boxed{2 \times 10}", 0),
    ("1.6e-19", r"\boxed{1.6 \cdot 10^{-19}}", 1),
    ("1.6e-19", r"\boxed{1.6 \cdot 10^{-18}}", 0),  # as good as 0 to six decimals
    ("0.00033333", r"\boxed{\frac{1}{3000}}", 1),
    ("7", "", 0),
]


def test_equivalent_answers(reward):
    scores = reward(prompts(*(reference for reference, _, _ in CASES)), [text for _, text, _ in CASES])
    assert [score.reward for score in scores] == [expected for _, _, expected in CASES]
    assert all(score.error is None for score in scores)


integers = st.integers(-(10**14), 10**14) | st.integers(-20, 20)
written = st.builds(lambda n, commas: f"{n:,}" if commas else str(n), integers, st.booleans())


@settings(max_examples=60)
@given(written, written, st.booleans())
def test_the_short_way_agrees_with_the_algebra(reference, answer, same):
    answer = reference.replace(",", "") if same else answer
    assert compare_exactly(reference, answer) is judge(reference, answer)


def test_a_hanging_answer_is_wrong_and_the_next_is_graded():
    reward = MathReward(timeout_s=0.5, workers=1)
    hang, fine = reward(prompts("9", "1/2"), [r"\boxed{9^{9^{9^{9}}}}", r"\boxed{0.5}"])
    assert (
        (hang.reward, hang.error) == (0.0, None)
        and "timeout_s=0.5" in hang.reason
        and (fine.reward, fine.error) == (1.0, None)
    )
    assert reward(prompts("1/4"), [r"\boxed{0.25}"])[0].reward == 1.0  # by the process that replaced it
    process = reward._idle.get()
    pid = process.process.pid
    os.kill(pid, signal.SIGKILL)  # any other death is retried, so it costs nothing
    reward._idle.put(process)
    assert reward(prompts("1/2"), [r"\boxed{0.5}"])[0].reward == 1.0
    reward.close()
    reward.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


HOSTILE = {
    "a million digits": r"\boxed{" + "9" * 10**6 + "}",
    "a million decimals": r"\boxed{0." + "3" * 10**6 + "}",
    "boxes in boxes": r"\boxed{" * 3000 + "1" + "}" * 3000,
    "empty braces": r"\boxed{" + "{" * 10**5 + "}" * 10**5 + "}",
    "a long list": r"\boxed{" + "1," * 10**5 + "1}",
    "a large matrix": r"\boxed{\begin{pmatrix}" + "1&" * 20000 + r"1\end{pmatrix}}",
    "markers": "####" * 10**5,
    "dollars": "$" * 10**5,
    "an unmarked number": "the answer is " + "9" * 10**6,
    "roots in roots": r"\boxed{" + r"\sqrt{" * 150 + "4" + "}" * 150 + "}",
    "brackets": r"\boxed{" + "(" * 400 + "1" + ")" * 400 + "}",
    "a factorial": r"\boxed{1000000!}",
    "spaces": " " * 10**5,
    "newlines": "\n" * 10**5,
    "fences": "```\n" * 25000,
    "fences in one line": "~~~ " * 25000 + "`",
    "a language that is none": "~~~" + "a" * 10**5 + "`",
    "open answers": "<answer>" * 12000,
    "open calls": "<tool_call>" * 9000,
    "open functions": "<function=f>" * 8000,
    "open names": "<function=" * 10**4,
    "open parameters": "<function=f>" + "<parameter=a>" * 8000 + "</function>",
    "open arguments": "<tool_call>f" + "<arg_key>a</arg_key><arg_value>" * 3000 + "</tool_call>",
}


def test_a_time_limit_is_not_tried_twice():
    asked = []

    def ask(*question: str) -> Score:
        asked.append(question[1])
        return Score(0.0) if question[1] == "0" else Score(0.0, error=f"{TOO_LONG}5")

    assert _graded(ask, ("7", "9^{9^{9}}", "")).error is None and asked == ["9^{9^{9}}", "0"]


@pytest.mark.parametrize(
    ("reference", "answer", "correct"),
    [
        ("7", r"1000000!", False),
        ("7", r"\binom{10^8}{5\cdot 10^7}", False),
        ("5000", r"\frac{5000!}{4999!}", True),
        ("4999950000", r"\binom{100000}{2}", True),
    ],
)
def test_numbers_that_hold_the_grader_are_not_computed(reference, answer, correct):
    assert bool(endless(answer)) is not correct and judge(reference, answer) is correct


def test_a_reference_that_hangs_is_an_error():
    reward = MathReward(timeout_s=0.5, workers=1)
    assert "timeout_s=0.5" in reward(prompts(r"9^{9^{9^{9}}}"), [r"\boxed{3+x}"])[0].error
    reward.close()


def test_no_answer_holds_the_grader():
    """Each ends within its deadline, as a wrong answer, and the grader continues."""
    reward = MathReward(timeout_s=0.5, workers=2)
    scores = reward(prompts(*["7"] * len(HOSTILE)), list(HOSTILE.values()))
    for name, score in zip(HOSTILE, scores, strict=True):
        assert (score.reward, score.error) == (0.0, None), (name, score)
    assert reward(prompts("7"), [r"\boxed{" + " " * 10**5 + "7}"])[0].reward == 1.0
    reward.close()


def test_without_workers_the_same_scores():
    reward = MathReward(workers=0)
    assert [score.reward for score in reward(prompts("1/2", "1/2"), [r"\boxed{0.5}", r"\boxed{2}"])] == [1.0, 0.0]


def test_processes_start_only_when_needed():
    reward = MathReward()
    assert [s.reward for s in reward(prompts("7", "7"), ["#### 7", "#### 8"])] == [1.0, 0.0]
    assert reward._threads is None and reward.answer(prompts("7")[0], "x\n#### 8") == "8"


def test_kinds_are_listed():
    with pytest.raises(ConfigError, match="reward.kind='maths': there is math, code, .*own. Did you mean 'math'"):
        build(SimpleNamespace(kind="maths"))
    assert isinstance(build(SimpleNamespace(kind="math", timeout_s=1.0, workers=1, answer="any")), MathReward)


READ = {
    r"so \boxed{8}": (1, 1, 1),
    "The answer is 8.": (0, 1, 1),
    "First 7, then 8.": (0, 0, 1),
    "Seven or so.": (0, 0, 0),
}


@pytest.mark.parametrize("how", ["boxed", "marked", "any"])
def test_where_an_answer_is_read_is_an_option(how):
    """Votes use the grader's answer."""
    column = ["boxed", "marked", "any"].index(how)
    reward = build(Reward(answer=how, workers=0))
    scores = reward(prompts(*["8"] * len(READ)), list(READ))
    assert [score.reward for score in scores] == [row[column] for row in READ.values()]
    votes = [reward.answer(prompts("8")[0], text) for text in READ]
    assert votes == ["8" if row[column] else None for row in READ.values()]


def test_another_way_to_read_is_refused():
    with pytest.raises(ValidationError, match="boxed"):
        Reward(answer="last")
    with pytest.raises(ValidationError, match="does nothing with kind code"):
        Reward(kind="code", answer="any")


def test_votes_count_equal_answers_together():
    reward, prompt = MathReward(workers=0), prompts("1/2")[0]
    texts = [r"\boxed{\frac{2}{4}}", "The answer is 0.5.", r"x = \boxed{x = 0.50}"]
    assert {reward.answer(prompt, text) for text in texts} == {"1/2"}
    asked = Prompt(0, (1,), "", "144", {}, "What is 57 + 87?")
    assert reward.answer(asked, "The answer is 57 + 87.") is None  # no answer, so no vote
