"""Pairs of reference and answer, in the forms in which benchmarks and models write them."""

import pytest

from megatron_rft.rewards.equivalence.latex import one_spelling, squeeze
from megatron_rft.rewards.equivalence.structure import equivalent, value_of

SAME = [
    ("R=1, I=(-1,1)", "I=(-1,1), R=1"),
    ("-0.891", r"\cos(207^\circ) \approx -0.891"),
    ("204_5", "204_{5}"),
    ("0.5", r"50\%"),
    ("4060", r"4\,060"),
    ("n", r"\text{The answer is } n"),
    ("17", "x = 17"),
    ("144", "57+87=144"),
    (r"\frac{10}{3}", r"\frac{10}{3} \approx 3.33"),
    ("1/2", "0.5"),
    ("[0,1)", "[0, 1)"),
    ("2, 3", "3, 2"),
    ("1,234", "1234"),
    (r"2\sqrt{3}", r"\sqrt{12}"),
    ("3x+1", "1+3x"),
    ("4.5e33", r"4.5 \times 10^{33}"),
    ("1000", "1e3"),
    ("1.6e-19", r"1.6 \cdot 10^{-19}"),
    ("0.00033333", r"\frac{1}{3000}"),
    (r"$\{x|-2\leq x < 1\}$", "[-2,1)"),
    (r"(-\infty, 2) \cup (3, \infty)", "x<2 or x>3"),
    (r"\{1\pm\sqrt{5},-2\}", r"-2, 1+\sqrt5, 1-\sqrt5"),
    (r"864 \mbox{ inches}^2", "864"),
    (r"15\mbox{ cm}^2", "15 cm^2"),
    (r"137 \frac{1}{2}", "137.5"),
    ("y = -2x", "-2x"),
    ("y = -2x", "2x+y=0"),
    (r"\begin{pmatrix} -2 \\ -14 \\ -7 \end{pmatrix}", r"\begin{bmatrix}-2\\-14\\-7\end{bmatrix}"),
    (r"\begin{pmatrix} -2 \\ -14 \\ -7 \end{pmatrix}", "(-2,-14,-7)"),
    (r"\text{(C)}", "C"),
    ("$69$,$84$", "84, 69"),
    (r"11,\! 111,\! 111,\! 100", "11111111100"),
    (r"\$32,\!348", "32348"),
    ("3:5", "3/5"),
    (r"\frac{n(n+1)(2 n+1)}{6}", r"\frac{2n^3+3n^2+n}{6}"),
    ("(12,3,4), (6,5.4,7.6)", "(6,5.4,7.6),(12,3,4)"),
    (r"-1, \; -5", "-5,-1"),
    ("x=9", "9"),
    ("9", "x=9"),
    (r"90^\circ", "90"),
    ("42", "٤٢"),
    ("42", "４２"),
    ("1024", "2^{10}"),
    (r"\frac{1}{3}", "0.333333333"),
    (r"6\frac23", "20/3"),
    ("5 million", "5000000"),
    ("Quadrant I", "Quadrant I"),
    ("10^{3},10", "10, 1000"),
    ("f(x)=x,f(x)=-x", "f(x)=-x, f(x)=x"),
    (r"$C=\frac{def}{de+df+ef}$", r"\frac{1}{1/d+1/e+1/f}"),
    ("5x - 11y + z - 17 = 0", "17 = 5x-11y+z"),
    ("6 - 5i", "-5i+6"),
    ("x=1, y=2", "1, 2"),
    ("(x,y)=(1,2)", "(1,2)"),
    (r"\mathbb{R}", r"(-\infty,\infty)"),
    (r"\emptyset", r"\text{no solution}"),
    (r"\emptyset", r"\{\}"),
    ("5", r"\text{five}"),
    ("99", "ninety-nine"),
    (r"n\pi, n\in\mathbb{Z}", r"k\pi \; (k \in \mathbb{Z})"),
    (r"\cot x", r"\frac{1}{\tan x}"),
    (r"\lfloor\sqrt{n-1}\rfloor", r"\lfloor \sqrt{n - 1} \rfloor"),
    ("2^{k-n}", r"\frac{2^k}{2^n}"),
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"),
    (r"(5,\infty)", "x>5"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3, \pi/2)"),
    (r"\frac14", r"25\%"),
    ("1,2", "(1,2)"),
    ("even", "Even"),
    (r"\left[ \frac{\pi}{4}, \frac{3 \pi}{4} \right]", r"[0.25\pi, 0.75\pi]"),
    ("2500,7500", "7500 and 2500"),
    ("-3,0", "x = -3 or x = 0"),
    (
        r"$\frac{1}{4}\overrightarrow{a} + \frac{1}{2}\overrightarrow{b}$ and $\frac{13}{24}$",
        r"\frac14\vec{a}+\frac12\vec{b}, \frac{13}{24}",
    ),
    ("46r", "46 r"),
    ("n(n-1)", "n^2-n"),
    (r"\text{empty}", "empty"),
    (r"12\times18\times11", "2376"),
    ("10", "10.0"),
    ("1000", "1 000"),
    ("0.17", "0.17"),
    ("x^2 + x", "x(x+1)"),
    ("16,3,1,1", "1,1,3,16"),
    ("22.1cm^{2}", "22.1"),
    (r"\sqrt{2}", r"\sqrt{2} \approx 1.414"),
    ("5", "five"),
    ("-7", "-7."),
    ("1.21", "1.210"),
    ("5", r"5 \text{ cm}"),
    (r"\frac{-1}{1997}", r"-\frac{1}{1997}"),
    ("Friday", r"\text{friday}"),
    (r"(4, \log _{10} 2)", r"(4,\log_{10}(2))"),
    (r"7.5^\circ", "7.5 degrees"),
    ("3^{4}", "81"),
    ("720", "6!"),
    ("120", r"\binom{10}{3}"),
]
DIFFERENT = [
    ("x=1, y=2", "2, 1"),
    ("x=1, y=2", "x=2, y=1"),
    (r"\mathbb{R}", r"(0,\infty)"),
    ("0", r"\emptyset"),
    ("99", "ninety-eight"),
    (r"n\pi, n\in\mathbb{Z}", r"2k\pi, k\in\mathbb{Z}"),
    ("R=1, I=(-1,1)", "R=1, I=(5,9)"),
    ("-0.891", r"\cos(207^\circ) \approx -5"),
    ("204_5", "204_6"),
    ("50", r"50\%"),
    ("17", r"17\%"),
    (r"\pi", "3.14159265"),
    ("17", "18 = 17"),
    ("17", "1 = 2 = 17"),
    ("144", "57+87"),
    ("7", "5 or 7"),
    (r"\frac{1}{2}", "0.25"),
    ("[0,1)", "(0, 1)"),
    ("2, 3", "2"),
    ("Paris", "Pairs"),
    ("2e", r"2 \times 10"),
    ("1.6e-19", r"1.6 \cdot 10^{-18}"),
    (r"15\mbox{ cm}^2", "15 cm^3"),
    ("y = -2x", "y=2x"),
    ("3R^2", "3r^2"),
    (r"\text{(C)}", "(D)"),
    (r"\frac{n(n+1)(2 n+1)}{6}", r"\frac{2n^3+3n^2}{6}"),
    ("42", "4٢"),
    (r"\frac{1}{3}", "0.33"),
    (r"20000/\pi", "6366.1977236758"),
    ("A", "B"),
    ("7", r"\text{not }7"),
    ("(1,2)", "(2,1)"),
    ("(1,2)", "2,1"),
    ("2n", "n"),
    ("7", "7 and 8"),
    (r"\{2,3,5\}", "(2,3,5)"),
    (r"\{2,3,5\}", "2,3"),
    ("(-2,2)", "[-2,2]"),
    ("16,3,1,1", "1,3,16"),
    (r"\sqrt{2}", "1.41421356"),
    (r"\sqrt{2}", r"\sqrt{2} \approx 1.5"),
    ("5", "5x"),
]


@pytest.mark.parametrize(("reference", "answer"), SAME)
def test_ways_to_write_the_same(reference, answer):
    assert equivalent(reference, answer)


@pytest.mark.parametrize(("reference", "answer"), DIFFERENT)
def test_what_is_not_the_same(reference, answer):
    assert not equivalent(reference, answer)


@pytest.mark.parametrize(
    ("reference", "answer", "question", "same"),
    [
        ("50", r"50\%", "What percent of them is red?", True),
        ("50", r"50\%", "What is the price after a discount of 5 percent?", False),
        (r"5.3\%", "5.3", "Find the percentage of it.", True),
        ("0.5", r"50\%", "", True),
    ],
)
def test_percentages_by_what_is_asked(reference, answer, question, same):
    assert equivalent(reference, answer, question) is same


@pytest.mark.parametrize(
    ("text", "form"),
    [
        (r"\dfrac12", r"\frac{1}{2}"),
        (r"\left( 3, 4 \right)", "( 3, 4 )"),
        (r"\sqrt3", r"\sqrt{3}"),
        ("½ × π", r"\frac{1}{2}\cdot \pi"),
        (r"11,\! 111", "11111"),
        ("３", "3"),
        (r"90^{\circ}", "90°"),
        (r"\$5", "5"),
    ],
)
def test_one_spelling(text, form):
    assert squeeze(one_spelling(text)) == squeeze(form)


def test_values_for_votes():
    assert value_of("x = 1,234 apples") == "1234" and value_of("2/4") == "1/2" and value_of("3, 1/2") == "3, 1/2"
