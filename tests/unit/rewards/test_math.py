import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from megatron_rft.config.rewards import CodeOptions, MathOptions
from megatron_rft.records import Prompt, Score
from megatron_rft.rewards import math
from megatron_rft.rewards.equivalence import trees
from megatron_rft.rewards.math import MathReward, judge
from megatron_rft.rewards.registry import build


def prompts(*answers: str) -> list[Prompt]:
    return [Prompt(index, (1,), "", answer) for index, answer in enumerate(answers)]


def verdict(reference: str, answer: str, question: str = "") -> Score:
    return MathReward()([Prompt(0, (1,), "", reference, {}, question)], [rf"\boxed{{{answer}}}"])[0]


@pytest.fixture(scope="module")
def reward():
    reward = MathReward()
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
    (r"\frac{2}{3}", r"\boxed{\frac{2}{3} = 0.67}", 1),  # a rounding of it
    ("2.5", r"\boxed{x = 2.4999 = 2.5}", 1),
    ("17", r"\boxed{x = 18 = 17}", 0),
]


def test_equivalent_answers(reward):
    scores = reward(prompts(*(reference for reference, _, _ in CASES)), [text for _, text, _ in CASES])
    assert [score.reward for score in scores] == [expected for _, _, expected in CASES]
    assert all(score.error is None for score in scores)


integers = st.integers(-(10**14), 10**14) | st.integers(-20, 20)


@settings(max_examples=60)
@given(integers, integers)
def test_integers_with_and_without_separators(one, other):
    assert judge(f"{one:,}", str(one)) and judge(str(one), f"{one:,}".replace(",", r"\,"))
    assert judge(str(one), f"{other:,}") is (one == other)


signed = st.builds(
    "{}{}{}".format, st.sampled_from(["", "", "-", "+"]), st.sampled_from(["", "", "0", "000"]), st.integers(0, 10**40)
)


@settings(max_examples=200)
@given(signed, signed | st.sampled_from(["0", "-0", "+00", "9" * 1000, "-" + "9" * 1000]), st.booleans())
def test_whole_numbers_are_judged_as_the_reader_would(one, other, percent):
    question = "What percent of 57 + 87 is it?" if percent else "What is 57 + 87?"
    pairs = [(one, other), (one, one), (one, f"-{one.lstrip('+-')}"), (one, f"00{one.lstrip('+-')}")]
    short = [judge(*pair, question) for pair in pairs]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(math, "WHOLE", re.compile("(?!)"))
        assert [judge(*pair, question) for pair in pairs] == short
    assert short[1]


def test_whole_numbers_are_not_read(monkeypatch):
    monkeypatch.setattr(math, "read", None)
    assert judge("144", "+0144") and not judge("144", "-144")


HOSTILE = {
    "sums in sums": r"\boxed{" + "".join(rf"\sum_{{{a}=1}}^{{999}}" for a in "abcde") + "abcde}",
    "sets in sets": r"\boxed{" + r"\{x|" * 90 + "x<1" + r"\}" * 90 + "}",
    "powers of powers": r"\boxed{" + "9^{" * 90 + "9" + "}" * 90 + "}",
    "letters": r"\boxed{" + "ab " * 330 + "}",
    "words": r"\boxed{3 " + r"\text{ab}^" * 90 + "2}",
    "sines of sines": r"\boxed{" + r"\sin(9^{" * 60 + "9" + "})" * 60 + "}",
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
    "backticks": "`" * 10**5,
    "backticks apart": "` " * 50000,
    "fences in one line": "~~~ " * 25000 + "`",
    "a language that is none": "~~~" + "a" * 10**5 + "`",
    "open answers": "<answer>" * 12000,
    "open calls": "<tool_call>" * 9000,
    "open functions": "<function=f>" * 8000,
    "open names": "<function=" * 10**4,
    "open parameters": "<function=f>" + "<parameter=a>" * 8000 + "</function>",
    "open arguments": "<tool_call>f" + "<arg_key>a</arg_key><arg_value>" * 3000 + "</tool_call>",
}


def test_a_failure_is_the_answers_or_the_references(monkeypatch):
    def judge(reference, answer, question):
        if "!" in reference + answer:
            raise MemoryError("a fault")
        return True

    monkeypatch.setattr(math, "judge", judge)
    assert "cannot be graded: MemoryError" in verdict("7", "9!").reason and verdict("7", "9!").error is None
    assert "the reference '9!': MemoryError" in verdict("9!", "7").error


def test_an_empty_reference_is_an_error(reward):
    assert "is empty" in reward(prompts(""), [r"\boxed{3}"])[0].error


@pytest.mark.parametrize(
    ("reference", "answer", "correct"),
    [
        ("7", r"1000000!", False),
        ("7", r"\binom{10^8}{5\cdot 10^7}", False),
        ("7", r"9^{9^{9^{9}}}", False),
        (r"9^{9^{9^{9}}}", "7", False),
        ("4999950000", r"\binom{100000}{2}", True),
    ],
)
def test_large_numbers_take_no_time(reference, answer, correct):
    started = time.thread_time()
    assert judge(reference, answer) is correct and time.thread_time() - started < 1


def test_an_answer_may_be_as_long_as_its_reference(reward):
    digits = "7" * 1200
    right, wrong = reward(prompts(digits, "7"), [rf"\boxed{{{digits}}}"] * 2)
    assert right.reward == 1 and "1200 characters" in wrong.reason


LONG = "+".join(rf"\sin(\cos({k}x))\tan({k}x)" for k in range(40))


def test_no_verdict_takes_longer_than_its_limit(monkeypatch):
    assert verdict("x", "0").reason == verdict("x", LONG).reason == "wrong answer"
    huge = "(" * 8 + "2" + "^9)" * 8
    assert verdict("x^2+3x+y+2", f"(x^2+3x+y+2){huge}/{huge}", "Expand $(x+1)(x+2)+y$.").reason == "wrong answer"
    monkeypatch.setattr(trees, "LIMIT_S", 0.004)
    score = verdict("x", LONG)
    assert "no verdict within" in score.reason and score.reward == 0.0 and score.error is None
    assert verdict("7", LONG).reason == "wrong answer"  # a formula is not computed for a number
    monkeypatch.setattr(trees, "LIMIT_S", 0.0)
    assert "no verdict within" in verdict("x(x+1)", "x^2+x").error  # the reference alone takes as long
    assert MathReward().answer(prompts("7")[0], r"\boxed{2/4}") is None
    monkeypatch.undo()
    assert MathReward().answer(prompts("7")[0], r"\boxed{2/4}") == "1/2"  # a limit ends with its verdict


def test_finding_and_judging_an_answer_have_one_limit(monkeypatch):
    """An answer that uses all of its time still leaves as much to see that the reference is not at fault."""
    started = []

    def slowly(*given) -> str:
        started.append(trees.verdict.end - time.thread_time())
        while True:
            trees.within_limit()

    monkeypatch.setattr(trees, "LIMIT_S", 0.2)
    monkeypatch.setattr(math, "final_answer", slowly)
    before = time.thread_time()
    score = MathReward()(prompts("7"), ["It takes long."])[0]
    assert "no verdict within" in score.reason and score.error is None and 0.09 < started[0] <= 0.1
    assert time.thread_time() - before < 0.2


def test_no_answer_holds_the_grader(reward):
    for name, text in HOSTILE.items():
        started = time.thread_time()
        (score,) = reward(prompts("7"), [text])
        assert (score.reward, score.error) == (0.0, None) and time.thread_time() - started < 3, (name, score)


def test_the_section_makes_the_grader():
    assert isinstance(build(MathOptions(answer="any")), MathReward)


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
    reward = build(MathOptions(answer=how))
    scores = reward(prompts(*["8"] * len(READ)), list(READ))
    assert [score.reward for score in scores] == [row[column] for row in READ.values()]
    votes = [reward.answer(prompts("8")[0], text) for text in READ]
    assert votes == ["8" if row[column] else None for row in READ.values()]


def test_another_way_to_read_is_refused():
    with pytest.raises(ValidationError, match="boxed"):
        MathOptions(answer="last")
    with pytest.raises(ValidationError, match="Extra inputs"):
        CodeOptions(answer="any")


def test_votes_count_equal_answers_together():
    reward, prompt = MathReward(), prompts("1/2")[0]
    texts = [r"\boxed{\frac{2}{4}}", "The answer is 0.5.", r"x = \boxed{x = 0.50}"]
    assert {reward.answer(prompt, text) for text in texts} == {"1/2"}
    asked = Prompt(0, (1,), "", "144", {}, "What is 57 + 87?")
    assert reward.answer(asked, "The answer is 57 + 87.") != "144"  # a sum that is left to be done is another answer


def test_a_thought_that_the_chat_template_has_opened_is_no_answer_before_its_end():
    opened = [Prompt(0, (1,), "", "5", opened=True)] * 2
    texts = [r"So it could be \boxed{5}", r"It is \boxed{4}.</think> It is \boxed{5}."]
    assert [score.reward for score in MathReward()(opened, texts)] == [0.0, 1.0]
    assert [MathReward().answer(opened[0], text) for text in texts] == [None, "5"]
