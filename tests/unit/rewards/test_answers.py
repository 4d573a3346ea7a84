import pytest

from megatron_rft.rewards.answers import as_latex, compare_exactly, final_answer, normalise


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{\frac{1}{2}} cm", r"\frac{1}{2}"),
        (r"\boxed{1} no, \boxed{2}", "2"),  # the last one counts
        ("\\boxed{1} then\n#### 2", "2"),
        (r"#### 2 then \boxed{1}", "1"),
        (r"first \boxed{1}, then \boxed{2", None),  # cut off while answering
        ("3+4=7\n#### 7\nQuestion: 9+9", "7"),
        ("#### $1,234.50 dollars.", "1,234.50"),
        ("#### -$5", "-5"),
        ("#### 40 %", "40%"),
        (r"\boxed{}", None),
        ("#### ", None),
        ("the answer is 5", None),
    ],
)
def test_the_marked_answer(text, answer):
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("$145$", "145"),
        ("72 apples", "72"),
        ("12,34", "12,34"),
        ("5x", "5x"),
        ("$1$ or $2$", "$1$ or $2$"),
        ("3.", "3"),
    ],
)
def test_one_form(text, form):
    assert normalise(text) == form


@pytest.mark.parametrize(
    ("reference", "answer", "verdict"),
    [
        ("1,234", "1234", True),
        ("7", "007", True),
        ("7", "8", False),
        ("x+1", "x+1", True),
        ("0.5", "1/2", None),  # algebra decides
        ("12,34", "1234", None),  # two values, not a number
        ("1" * 5000, "2", None),
    ],
)
def test_what_text_and_integers_settle(reference, answer, verdict):
    assert compare_exactly(reference, answer) is verdict


def test_words_are_not_products_of_letters():
    assert as_latex("Paris") == r"\boxed{\text{Paris}}" and as_latex("x") == r"\boxed{x}"
