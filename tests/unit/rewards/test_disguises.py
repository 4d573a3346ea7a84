"""tools/bench/disguises.py on a few questions: no rewritten formula of a question is rewarded, its answer is."""

import importlib.util
import random
from pathlib import Path

import pytest

from megatron_rft.rewards.math import judge

SCRIPT = Path(__file__).resolve().parents[3] / "tools/bench/disguises.py"
ROWS = [
    ("Simplify $90r - 44r$.", "46r", "90r - 44r"),
    ("Factor $ab+5b+2a+10$.", "(a+5)(b+2)", "ab+5b+2a+10"),
    ("Expand $(x+1)(x-2)$.", "x^2-x-2", "(x+1)(x-2)"),
    ("Compute $5!$.", "120", "5!"),
    (r"Compute $\dbinom{5}{2}$.", "10", r"\dbinom{5}{2}"),
    (r"Evaluate $\log_2 8$.", "3", r"\log_2 8"),
    (r"Simplify $\sqrt{12}$.", r"2\sqrt{3}", r"\sqrt{12}"),
    (r"What is $\frac{4}{6}$ in lowest terms?", r"\frac{2}{3}", r"\frac{4}{6}"),
    (r"Compute $\int_0^1 x^2 dx$.", r"\frac{1}{3}", r"\int_0^1 x^2 dx"),
    (r"Rationalize $\frac{1}{\sqrt{3}}$.", r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}"),
    ("Compute $(2+i)^2$.", "3+4i", "(2+i)^2"),
    (r"What is $\tan 45^\circ$?", "1", r"\tan 45^\circ"),
    ("What is 57 + 87?", "144", "57 + 87"),
    (r"Compute $2^3 \cdot 2^2$.", "32", r"2^3 \cdot 2^2"),
    (r"Express $0.\overline{5}$ as a common fraction.", r"\frac{5}{9}", r"0.\overline{5}"),
    ("Factor $36-4x^2$.", "4(3-x)(3+x)", "36-4x^2"),
]


@pytest.fixture(scope="module")
def search():
    spec = importlib.util.spec_from_file_location("disguises", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("question", "reference", "formula"), ROWS)
def test_no_rewritten_question_is_bought(search, question, reference, formula):
    assert judge(reference, reference + " ", question) and judge(reference, f"x = {reference}", question)
    for seed in range(3):
        assert search.bought(question, reference, [formula], random.Random(seed)) is None


def test_the_rewrites_keep_the_value(search):
    """Else the search would find nothing because its answers are wrong: against another question they are right."""
    choose, right = random.Random(0), 0
    for _ in range(60):
        right += judge("x^2-x-2", search.rewritten("(x+1)(x-2)", choose), "")
    assert len(search.WHOLE) + len(search.PARTS) + 2 >= 30 and right > 15
