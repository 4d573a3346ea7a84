import time

import pytest

from megatron_rft.responses import Prompt
from megatron_rft.rewards.answers import final_answer
from megatron_rft.rewards.equivalence.trees import MINUS, ONE, is_numeral
from megatron_rft.rewards.math import MathReward, judge, vote


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{\frac{1}{2}} cm", r"\frac{1}{2}"),
        (r"\boxed{1} no, \boxed{2}", "2"),  # the last one counts
        (r"\boxed{5} or \boxed{7}", "5, 7"),  # one answer with two values
        (r"$\boxed{5}$ and $\boxed{5}$", "5"),
        (r"$x = \boxed{-2}$ or $x = \boxed{1}$", "-2, 1"),
        (r"$x_1=\boxed{1}$, $x_{2} = \boxed{-2}$", "1, -2"),
        ("1. $\\boxed{1}$\n2. $\\boxed{-2}$", "1, -2"),
        (r"$\boxed{7} \cup \boxed{8}$", "7, 8"),
        (r"$\boxed{7}, \ldots, \boxed{8}$", "7, 8"),
        (r"$n = \boxed{7}$, so $x = \boxed{8}$", "8"),
        (r"\boxed{1}. So the answer is not that but \boxed{2}", "2"),
        (r"\boxed{1} but maybe \boxed{2}?", "1, 2"),
        ("\\boxed{1} then\n#### 2", "2"),
        (r"#### 2 then \boxed{1}", "1"),
        (r"first \boxed{1}, then \boxed{2", None),  # cut off while answering
        ("3+4=7\n#### 7\nQuestion: 9+9", "7"),
        ("#### $1,234.50 dollars.", "$1,234.50 dollars"),
        (r"\boxed{}", None),
        ("#### ", None),
        ("\\boxed{8}\n\n#### Verification\n3+5 is it, as required.", "8"),  # headings after the answer
        ("\\boxed{8}\n#### Explanation", "8"),
        ("\\boxed{8}\n#### Step 1: 3+5", "8"),
        ("\\boxed{8}\n#### **Check of x = 3**", "8"),
        ("\\boxed{8}\n#### Verification\nIt fits.\n#### 9", "9"),
        ("#### Step 1: Add\n3+5=8\n#### Conclusion\nThe answer is 8.", "8"),
        ("#### Final Answer\n\n8", "8"),
        ("#### Answer: 8\n", "Answer: 8"),
        ("#### \\frac{1}{2}", r"\frac{1}{2}"),
        ("#### Paris", "Paris"),
        ("#### 8 #### 9", "9"),
        ("<think>\\boxed{3}</think> It is 4.", "4"),
        ("<answer> 7 </answer>", "7"),
        ("<answer>5 <answer>7</answer>", "7"),
        ("the answer is 5", "5"),
        ("The final answer is: $\\frac{1}{2}$. I hope it is correct.", r"\frac{1}{2}"),
        ("**Answer:** 42 apples", "42 apples"),
        ("Answer:\n\n\\(x = 5\\)", r"\(x = 5\)"),
        ("The answer is 5, since 2 + 3 is 5.", "5,"),
        ("The answer is not 5.", None),
        ("To find the answer, we add: 57 + 87 = 144.", "57 + 87 = 144"),
        ("57 + 87 = 144", "57 + 87 = 144"),
        ("So she has 12 apples left.", "12 apples left"),
        ("42 is the answer.", "42"),
        ("x\n\n17", "17"),
        ("It is 17. This is a sum.", "17"),
        ("It is 17. We add 5 and 12 to see it", None),
        ("First 10, then 11.", None),
        ("```python\nprint(144)\n```", None),
        ("Thus the solutions are $x = 2$ and $x = -2$.", "$x = 2$ and $x = -2$"),
        (r"The probability is $\frac{1}{6} \approx 0.1667$.", r"\frac{1}{6} \approx 0.1667"),
        ("The time is 3:30.", "3:30"),
        ("The vertex is at (1, 2).", "(1, 2)"),
        ("### Final Answer\n\n\\[\n\\frac{14}{3}\n\\]", r"\[ \frac{14}{3} \]"),  # a display of three lines
        ("We get\n$$\n8\n$$\n", "$$ 8 $$"),
        ("Therefore:\n\\[\nx = 8\n\\]", r"\[ x = 8 \]"),
        ("The difference between 98 and 97 is 1.", "1"),
        ("The answer is between 3 and 5.", None),
        ("The answer is 124, and 65 + 59 is 124.", "124"),
        ("The answer is 2, 3, and 5.", "2, 3, and 5"),
        ("She has 3 + 2, which is 5.", "5"),
        ("In this case, the answer is indeed 104, which is a result of", "104,"),
        ("I'll add it to the end of the answer: 40 +", None),
        ("I cannot do that.", None),
        ("She sells 9 eggs for $18.\nA: 18", "18"),
        ("Together it is $204 + $160 + $330 = $694.", "$694"),
        (r"So \boxed{\left\{1, 2\right.}", r"\left\{1, 2\right"),  # an escaped brace closes nothing
        ("The answer is neither.", "neither"),
        ("The answer is neither 3 nor 4.", None),
        ("The answer is 3 (or 4).", None),
        ("The answer is 5, not 6.", "5"),
        ("It is not 6, the answer is not 5, not 6.", None),
        ("```latex\n\\boxed{7}\n```", None),
        ("<think>It is \\boxed{7}.</think>", None),
        ("<think>It is \\boxed{7}.", None),
        ("", None),
    ],
)
def test_the_marked_answer(text, answer):
    assert final_answer(text) == answer


def test_only_a_box_or_any_number():
    assert final_answer("The answer is 5.", "boxed") is None and final_answer(r"\boxed{5}", "boxed") == "5"
    assert final_answer("#### 5", "boxed") is None
    assert final_answer("First 10, then 11.", "any") == "11"
    assert final_answer("We add $3 x$ to", "any") == "3 x"
    assert final_answer("The answer is 5, not 6.", "any") == "5"


@pytest.mark.parametrize("text", ["=" * 4000, "is " * 3000, ":" * 4000, r"\( =" * 3000])
def test_hundreds_of_verbs_take_no_quadratic_time(text):
    start = time.process_time()
    final_answer(text)
    assert time.process_time() - start < 0.5


def test_what_a_response_says_of_the_question():
    text = "61 - 48 is 13. Subtraction takes 48 away from 61"
    assert final_answer(text, question="What is 61 - 48?") == "13"
    assert final_answer(text, question="What is 61 - 4?") is None  # 61 - 4 is another formula
    assert final_answer("24 + 38 is 62, which is wrong", question="24 + 38") is None
    assert final_answer("19 + 10 is 29, the answer is no.", question="19 + 10") == "29"
    assert final_answer("34 + 25 equals 59\n\nThe answer is provided by the", question="34 + 25") == "59"
    assert final_answer("Thus the answer is five.", question="2 + 3") == "five"
    assert final_answer("47 + 18 = 65 The answer is '65' (18 + 18", question="47 + 18") == "65"
    assert final_answer("3 + 4 = 7, so the answer is yes.", question="Is 3 + 4 = 7?") == "yes"


@pytest.mark.parametrize(
    ("answer", "reference", "question", "echo"),
    [
        ("57 + 87", "144", "What is 57 + 87?", True),
        ("87+57", "144", "", True),  # a sum that is left to be done
        ("57 + 87 = 144", "144", "What is 57 + 87?", False),
        ("(x+1)^2", "x^2+2x+1", "Expand $(x+1)^2$.", True),
        ("x^2 + 2x + 1", "x^2+2x+1", "Is it $x^2+2x+1$ or $x^2$?", False),  # the reference's own text
        (r"\frac{144}{12}", "12", r"What is $\frac{144}{12}$?", True),
        (r"\frac12", "0.5", r"A coin shows heads with probability $\frac{1}{2}$. Is it fair, and why?", False),
        (r"\frac12", "0.5", r"Write $\frac{1}{2}$ as a decimal.", True),
        ("2^{10}", "1024", "How many subsets?", False),
        ("2^{10} - 1", "1023", "How many subsets of a set of 10 have a member?", False),
        (r"\frac{10 \cdot 9}{2}", "45", "How many pairs are there of 10?", True),  # a product that is left to be done
        (r"\frac{3 \cdot 24}{3 \cdot 5}", r"\frac{24}{5}", "", True),  # products that are left to be done
        (r"\sqrt{(57+87)^2}", "144", "What is $57 + 87$?", True),  # all numbers of the question's formula
        ("2^5", "32", "What is $2^3 \\cdot 2^2$?", False),
        ("57.0 + 87", "144", "What is $57 + 87$?", True),
        ("(x)+{x^1}", "2x", "Simplify $x+x$.", True),
        (r"\int_0^1 t^2 dt", r"\frac13", r"Compute $\int_0^1 x^2 dx$.", True),
        (r"\frac{d}{dx} x^3", "3x^2", "Differentiate $x^3$.", True),
        ("(x^3)'", "3x^2", "Differentiate $x^3$.", True),
        (r"\gcd(48,180)", "12", "Find the greatest common divisor of 48 and 180.", True),
        (r"\tan 60^\circ", r"\sqrt3", r"What is $\tan 60^\circ$?", True),
        ("f(3)", "9", "Let $f(x) = x^2$. Find $f(3)$.", True),
        ("2x+3=11", "x=4", "Solve $2x+3=11$.", True),
        (r"\binom{10}{2}", "45", "Of 10 people each 2 shake hands. How many handshakes are there?", True),
        ("5!", "120", "In how many orders can 5 books stand?", True),
        ("36-4x^2+x-x", "4(3-x)(3+x)", "Factor $36-4x^2$.", True),  # padded
        (r"\left(1+2i\right)", "1+2i", r"Is $\left(1+2i\right)$ or $2i$ a root?", False),
        ("2^{10}", "1024", "How many subsets has a set of 10, with 2 choices for each?", True),
        ("7", "7", "Is it 7?", False),
        ("2x = 6", "x = 3", "Solve $2x=6$.", True),
        ("x = 3", "3", "Is $x = 3$ a solution, or $x = 4$?", False),
        ("-3", "-3", "", False),
        ("{90r-44r}", "46r", "Simplify $90r-44r$.", True),  # braces that only group
        ("{5!}", "120", "Compute $5!$.", True),
    ],
)
def test_what_repeats_the_question(answer, reference, question, echo):
    assert judge(reference, answer, question) is not echo


@pytest.mark.parametrize(
    ("answer", "form"),
    [("1,234 apples", "1234"), ("x = 0.50", "1/2"), (r"\dfrac24", "1/2"), ("3, 5", "3, 5"), ("-1", "-1")],
)
def test_one_form_for_votes(answer, form):
    assert vote(answer) == form


@pytest.mark.parametrize("answer", ["i^2", r"e^{i\pi}", "2/2", "5-4"])
def test_one_and_minus_one_are_numbers(answer):
    """Of which a formula of the same value is no answer."""
    negative = answer if "i" in answer else f"-({answer})"
    assert judge("1", "1") and judge("-1", "-1") and judge("-1", "-1.0")
    assert not judge("1", answer) and not judge("-1", negative)


@pytest.mark.parametrize("text", ["#### 9 **04662", "#### 1 - 1", "#### -1 * 1"])
def test_a_vote_is_text_or_none(text):
    """A huge number cannot be printed; plus or minus 1 has no other part."""
    found = MathReward().answer(Prompt(0, (), "", "3"), text)
    assert found is None or isinstance(found, str)


def test_plus_or_minus_one_alone_is_a_numeral():
    assert is_numeral(("+", ONE, MINUS)) is False and is_numeral(("*", MINUS, MINUS))
