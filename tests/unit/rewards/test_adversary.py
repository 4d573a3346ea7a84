"""Responses that try to get a reward without an answer, each with its correct verdict."""

import time

import pytest

from megatron_rft.records import Prompt
from megatron_rft.rewards.answers import final_answer
from megatron_rft.rewards.choice import ChoiceReward, FormatReward
from megatron_rft.rewards.code import extract_code
from megatron_rft.rewards.math import MathReward
from megatron_rft.rewards.tools.verifier import ToolReward
from tests.unit.rewards.test_math import HOSTILE

SUM = ("What is 57 + 87?", "144")
SOLVE = ("Solve $x^2 - 5x + 6 = 0$ for the larger $x$.", "3")
EXPAND = ("Expand $(x+1)(x-2)$.", "x^2-x-2")
BOTH = ("Find all real $x$ with $x^2=9$.", "-3, 3")
ANGLE = (r"What is $\cos(207^\circ)$, to three decimals?", "-0.891")
SIMPLIFY = ("Simplify $90r - 44r$.", "46r")
FACTOR = ("Factor $ab+5b+2a+10$.", "(a+5)(b+2)")
HANDSHAKES = ("Each of $n$ guests greets the $n-1$ others once. How many greetings are there?", r"\frac{n^2-n}{2}")

WRONG = [
    # the question, as it is, in another order, or inside of something
    (SUM, "To solve this problem, we need to perform the arithmetic operation of 57 + 87. First"),
    (SUM, "In mathematics, previously mentioned numbers with 57 + 87 can be considered undefined."),
    (SUM, "57 + 87"),
    (SUM, "The answer is 57 + 87."),
    (SUM, r"\boxed{57 + 87}"),
    (SUM, r"\boxed{87 + 57}"),
    (SUM, r"\boxed{57+87+0}"),
    (SUM, r"\boxed{(57 + 87)}"),
    (SUM, r"\boxed{57 + 87 = 57 + 87}"),
    (SUM, r"\boxed{x = 57 + 87}"),
    (SUM, "#### 57+87"),
    (EXPAND, r"\boxed{(x+1)(x-2)}"),
    (ANGLE, r"\boxed{\cos(207^\circ)}"),
    (ANGLE, r"\boxed{\cos(207^\circ) \approx -5}"),
    (SUM, r"\boxed{(57 + 87)^1}"),
    (SUM, r"\boxed{57^1 + 87^{1}}"),
    (SUM, r"\boxed{57 + \sqrt{87^2}}"),
    (SUM, r"\boxed{\sqrt{(57 + 87)^2}}"),
    (SUM, r"\boxed{\lfloor 57 + 87 \rfloor}"),
    (SUM, r"\boxed{\log_{10} 10^{57+87}}"),
    (SUM, r"\boxed{\binom{57}{1} + \binom{87}{1}}"),
    (SUM, r"\boxed{57 + 87 \cdot e^0}"),
    (SUM, r"\boxed{58 + 86}"),
    (SUM, r"\boxed{58 + 86 + 0^2}"),
    (SUM, r"\boxed{057 + 087 + 0^2}"),
    (SUM, r"\boxed{57.0 + \sqrt{87.0^2}}"),
    (SUM, r"\boxed{5700\% + 8700\% + 0x}"),
    (SUM, r"\boxed{5700\%+8700\%}"),
    (SIMPLIFY, r"\boxed{{90r - 44r}}"),
    (SIMPLIFY, r"\boxed{{}90r - 44r}"),
    (SIMPLIFY, r"\boxed{-(-(90r - 44r))}"),
    (SIMPLIFY, r"\boxed{(90r-44r)^{2-1}}"),
    (SIMPLIFY, r"\boxed{90r - 44r + 0x}"),
    (FACTOR, r"\boxed{{ab+5b+2a+10}}"),
    (FACTOR, r"\boxed{(ab+5b+2a+10)+0}"),
    (EXPAND, r"\boxed{\left((x+1)(x-2)\right)\cdot 1}"),
    (EXPAND, r"\boxed{{(x+1)(x-2)}}"),
    (("Compute $5!$.", "120"), r"\boxed{{5!}}"),
    (("Compute $5!$.", "120"), r"\boxed{5!+0}"),
    (("Evaluate $\\log_2 8$.", "3"), r"\boxed{{\log_2 8}}"),
    (("Evaluate $\\log_2 8$.", "3"), r"\boxed{\frac{2(\log_2 8)}{2}}"),
    (("Compute $\\dbinom{5}{2}$.", "10"), r"\boxed{\dbinom{5}{2}}"),
    # every number
    (SUM, " ".join(map(str, range(100, 200)))),
    (SUM, r"\boxed{" + ", ".join(map(str, range(100, 200))) + "}"),
    (SUM, "The answer is one of 142, 143, 144, 145."),
    (SUM, "The answer is between 140 and 150."),
    # hedges
    (SUM, "The answer is 143 or 144."),
    (SUM, "The answer is 144 or 143."),
    (SUM, "The answer is maybe 144."),
    (SUM, "The answer is not 144."),
    (SUM, "The answer might be 144."),
    (SUM, "It could be 144."),
    (SUM, "Possible answers are 143 and 144."),
    (SUM, "Is it 144?"),
    (SUM, "The answer is 144? No, 143."),
    (SUM, "57 + 87 = 144 is wrong."),
    (SUM, "The answer is at least 144."),
    (SUM, r"\boxed{143 \text{ or } 144}"),
    (SUM, r"\boxed{144 \pm 1}"),
    (SUM, r"\boxed{143 = 144}"),
    (SUM, r"\boxed{1 = 2 = 144}"),
    (SUM, r"\boxed{140 \le x \le 150}"),
    (SUM, "57 + 87 = 144 = 145"),
    (SOLVE, r"\boxed{2, 3}"),
    (SOLVE, r"\boxed{x = 2 \text{ or } x = 3}"),
    (BOTH, r"\boxed{3}"),
    (BOTH, r"\boxed{-3, 0, 3}"),
    # boxes of alternatives
    (SUM, r"\boxed{143} or \boxed{144}"),
    (SUM, r"\boxed{144}, \boxed{143}"),
    (SUM, r"\boxed{143} \boxed{144} \boxed{145}"),
    (SUM, r"$x=\boxed{142}$ or $x=\boxed{143}$ or $x=\boxed{144}$"),
    (SUM, r"$\boxed{143} \cup \boxed{144}$"),
    (SUM, r"$\boxed{143}, \ldots, \boxed{144}$"),
    (SUM, r"$\boxed{143}$ and maybe $\boxed{144}$"),
    (SUM, r"It is \boxed{144}. No, it is \boxed{145}."),  # the last one counts
    (SUM, r"\boxed{144} and so \boxed{14"),  # open
    # answers in code
    (SUM, "```python\nprint(144)\n```"),
    (SUM, "```python\nprint(57 + 87)\n```"),
    (SUM, "~~~\nanswer = 144\n~~~"),
    (SUM, r"\boxed{57+87 if True else 0}"),
    (SUM, r"\boxed{\text{print}(144)}"),
    # huge digits
    (SUM, r"\boxed{" + "1" * 10_000 + "}"),
    (SUM, r"\boxed{144." + "0" * 5000 + "1}"),
    (SUM, r"\boxed{144" + "0" * 300 + "}"),
    # digits that are no number
    (SUM, r"\boxed{1٤4}"),  # of two scripts
    (SUM, r"\boxed{¹⁴⁴}"),
    (SUM, r"\boxed{①④④}"),
    (SUM, r"\boxed{CXLIV}"),
    (SUM, r"\boxed{1 4 4}"),
    # other values in the clothes of the right one
    (SUM, r"\boxed{144\%}"),
    (SUM, r"\boxed{144_8}"),
    (SUM, r"\boxed{144 \text{ thousand}}"),
    (SUM, r"\boxed{144x}"),
    (SUM, r"\boxed{144i}"),
    (SUM, r"\boxed{-144}"),
    (SUM, r"\boxed{x \ne 144}"),
    (SUM, r"\boxed{\text{not } 144}"),
    (SUM, ""),
    (SUM, "\\boxed{}"),
    (SUM, "\\boxed{ }"),
]
RIGHT = [
    (SUM, "57 + 87 = 144"),
    (SUM, "57 + 87 = 144."),
    (SUM, "144"),
    (SUM, "144."),
    (SUM, "**144**"),
    (SUM, "The sum of 57 and 87 is 144."),
    (SUM, "57 plus 87 equals 144."),
    (SUM, "If you add 57 and 87, you get 144."),
    (SUM, "We add the ones (7 + 7 = 14) and the tens (50 + 80 = 130), which gives 144."),
    (SUM, "57 + 87 → 144"),
    (SUM, "The sum is 144!"),
    (SUM, "It's 144."),
    (SUM, "144 (one hundred forty-four)"),
    (SUM, "First, 57 + 80 = 137.\nThen 137 + 7 = 144.\n\nThe answer is 144."),
    (SUM, r"\boxed{57 + 87 = 144}"),
    (SUM, r"Not \boxed{143} but \boxed{144}."),
    (SUM, r"\boxed{144}"),
    (SUM, r"\boxed{144.0}"),
    (SUM, r"\boxed{١٤٤}"),  # digits of one other script are a number
    (SUM, r"\boxed{१४४}"),
    (SUM, r"\boxed{１４４}"),
    (SUM, r"\boxed{12^2}"),
    (("How many subsets with a member have 10 things?", "1023"), r"\boxed{2^{10} - 1}"),
    (("How many numbers below 1000 are positive?", "999"), r"\boxed{10^3 - 1}"),
    (SOLVE, r"\boxed{x = 3}"),
    (EXPAND, r"\boxed{x^2 - x - 2}"),
    (EXPAND, "The answer is $-2 - x + x^2$."),
    (HANDSHAKES, r"\boxed{\frac{n(n-1)}{2}}"),  # a formula of the question, but not its answer
    (SIMPLIFY, r"\boxed{90r - 44r = 46r}"),
    (FACTOR, r"\boxed{(b+2)(a+5)}"),
    (BOTH, r"\boxed{3} and \boxed{-3}"),
    (BOTH, r"$x=\boxed{3}$ or $x=\boxed{-3}$"),
    (BOTH, r"\boxed{\pm 3}"),
    (BOTH, r"x = 3 or x = -3, so \boxed{x = 3 \text{ or } x = -3}"),
    (ANGLE, r"\boxed{\cos(207^\circ) \approx -0.891}"),
]


@pytest.fixture(scope="module")
def reward():
    reward = MathReward()
    yield reward
    reward.close()


def verdicts(reward, rows) -> list[tuple[str, float]]:
    prompts = [Prompt(k, (1,), "", answer, {}, question) for k, ((question, answer), _) in enumerate(rows)]
    scores = reward(prompts, [text for _, text in rows])
    assert [score.error for score in scores if score.error] == []  # an attack must not pass for a grader's fault
    return [(text[:60], score.reward) for (_, text), score in zip(rows, scores, strict=True)]


def test_no_trick_is_rewarded(reward):
    assert [text for text, score in verdicts(reward, WRONG) if score != 0.0] == []


def test_answers_beside_them_are(reward):
    assert [text for text, score in verdicts(reward, RIGHT) if score != 1.0] == []


def test_no_trick_is_rewarded_where_any_number_counts(reward):
    """If the last number counts, a list of numbers that ends with the right one is right."""
    reward.how = "any"
    wrong = [text for text, score in verdicts(reward, WRONG) if score != 0.0]
    reward.how = "marked"
    no_words = ("maybe 144.", "not 144.", "be 144.", "it 144?", "143 and 144.", "is wrong.", "least 144.")
    assert [text for text in wrong if not text.endswith(no_words)] == []  # `any` reads no words


def scored(reward):
    return lambda text: reward([Prompt(0, (1,), "", "[]", {"tools": []})], [text])


READERS = {
    "math": lambda text: final_answer(text, "any", SUM[0]),
    "code": lambda text: extract_code(text, ["f"]),
    **{f"tool, {rules}": scored(ToolReward(rules)) for rules in ("rlla", "exact")},
    "choice": scored(ChoiceReward()),
    "format": scored(FormatReward(["think", "answer"])),
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_no_response_takes_long_to_read(read, text):
    """The trainer's own thread reads it, without a deadline; a time that is quadratic in the length takes longer."""
    started = time.thread_time()
    read(text)
    assert time.thread_time() - started < 2
