"""How models write what the reference writes otherwise, by class; and answers beside each class that are wrong."""

import time

import pytest

from megatron_rft.records import Prompt
from megatron_rft.rewards.choice import chosen
from megatron_rft.rewards.code import extract_code
from megatron_rft.rewards.math import MathReward, judge

RIGHT = {
    "units": [
        ("20", r"20 \text{ min}"), (r"20\text{ min}", "20"), (r"2\text{ h}", r"120\text{ min}"), ("20", "20 mins"),
        ("6", r"6\text{ times}"), (r"5 \text{ lb}", r"5 \text{ pounds}"), (r"9\text{ cm}^2", r"9\,\mathrm{cm}^{2}"),
    ],
    "currencies": [
        ("7.50", "USD 7.50"), (r"\$30", r"30\text{ dollars}"), (r"\$30", "30 USD"), ("€30", r"\text{EUR }30"),
        ("£30", r"30\text{ pounds}"), ("250", "Rs. 250"), ("¥250", "250 yuan"), ("¥250", "250 yen"),
        ("9", r"\text{\$}9"),
        (r"\$30", r"US\$30"), (r"\$0.80", r"80\text{ cents}"),
    ],
    "powers": [
        ("2048", "2^11"), ("y^{12}", "y^12"), ("10^{-12}", "10^-12"), (r"3.1\times 10^{14}", "3.1 * 10^14"),
        (r"3.1\times 10^{14}", "3.1 x 10^14"), (r"3.1\times 10^{14}", "3.1×10¹⁴"), ("a^{12}b^{13}", "a^12 b^13"),
    ],
    "spaces": [("4", r"4\;"), ("4", "4\\ "), (r"\frac13", r"\frac{1}{3}\!"), ("4", r"4\quad")],
    "names": [
        ("(4,6)", "x=4, y=6"), ("(4,6)", r"y=6\text{ and }x=4"), ("x=4, y=6", "(4,6)"), ("(4,6,1)", "a=4, b=6, c=1"),
        ("x=9", "9=x"), ("9", "9 = k"),
        ("a=4, b=6", "(a,b)=(4,6)"), ("(a,b)=(4,6)", "b=6, a=4"), ("(4,6)", r"\begin{cases} x=4, \\ y=6 \end{cases}"),
        ("(4,6)", r"\left\{\begin{array}{l} x=4 \\ y=6 \end{array}\right."),
    ],
    "dressing": [
        ("9", r"\color{blue}{9}"), ("9", r"\textcolor{red}{9}"), ("9", r"{\bf 9}"), ("9", r"\underline{9}"),
        ("9", r"9 \tag{3}"), ("9", r"\therefore 9"), (r"\frac29", r"{2\over 9}"), (r"\frac{a+1}{b}", r"{a+1 \over b}"),
        ("20", r"{6\choose 3}"), (r"\frac59", r"0.\dot{5}"), (r"\frac{1}{12}", r"0.08\dot3"), (r"\frac59", "0.555..."),
        (r"\frac{12}{99}", r"0.\dot1\dot2"), ("9", "9\u200b"), ("19", "1\u20609"), ("9", "\ufeff９"), (r"\frac38", "⅜"),
    ],
    "times": [("5:45", "5{:}45"), ("5:45", r"5\colon45"), (r"5:45\text{ PM}", "5:45 p.m."), ("5:45", "05:45"),
        (r"5:45\text{ PM}", "17:45"), (r"0:20", r"12:20\text{ AM}"), (r"2\text{ h }20\text{ min}", "140 min"),
        (r"2.5\text{ hours}", r"2\text{ hours and }30\text{ minutes}"),
        (r"\$1.30", r"1\text{ dollar and }30\text{ cents}"),
    ],
    "functions": [
        ("e^{3x}", r"\exp(3x)"), (r"\sin 4x", r"2\sin 2x\cos 2x"), (r"\cos 2x", r"2\cos^2 x-1"),
        ("|y|", r"\sqrt{y^2}"), (r"\frac{m(m-1)}{2}", r"\binom{m}{2}"), (r"\binom{m}{2}", r"\frac{m!}{2!(m-2)!}"),
    ],
    "matrices": [
        (r"\begin{pmatrix}5&6\\7&8\end{pmatrix}", "[[5,6],[7,8]]"), (r"\begin{pmatrix}5\\6\end{pmatrix}", "[5,6]"),
        (r"\begin{pmatrix}5&10\\15&20\end{pmatrix}", r"5\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
        (r"\frac13\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1/3&2/3\\1&4/3\end{bmatrix}"),
    ],
    "words": [
        (r"9\text{th}", "ninth"), (r"9^{\text{th}}", r"\text{9th}"), (r"\text{22nd}", "twenty-second"),
        (r"\text{June }7", r"\text{7 June}"), (r"\text{June 7}", r"\text{the 7th of June}"),
        (r"\text{June 7}", "Jun. 7"),
        (r"\text{Yes}", r"\text{Yes, they do.}"), (r"\text{No}", r"\text{No, it isn't}"),
        ("305", "three hundred and five"),
        (r"\text{green, blue}", r"\text{blue and green}"), (r"\text{Al and Bo}", r"\text{Bo}, \text{Al}"),
        (r"\frac34", r"\text{three quarters}"), (r"\emptyset", r"\text{There is no solution}"),
    ],
    "percentages": [
        (r"16\frac23\%", r"\frac{50}{3}\%"), (r"16\frac23\%", r"16.\overline{6}\%"), (r"4\%", r"4\text{ per cent}"),
    ],
    "sets": [(r"\{\emptyset\}", r"\{\varnothing\}"), (r"\{\{1\},2\}", r"\{2,\{1\}\}"), (r"\{1\}", "1")],
}  # fmt: skip
WRONG = {
    "units": [
        (r"20\text{ min}", r"20\text{ h}"), ("20", r"20\text{ times }3"), (r"\min(3,5)", r"5\text{ min}"),
        ("20", r"20\text{ dozen}"), (r"5 \text{ lb}", "£5"),
    ],
    "currencies": [
        (r"\$30", "€30"), (r"\$30", "EUR 30"), (r"\$30", r"30\text{ cents}"), ("¥250", r"\$250"), ("£30", "30 yen"),
        (r"250\text{ yen}", r"250\text{ yuan}"),
    ],
    "powers": [
        ("2^{11}", "2^1"), ("2048", "2^12"), ("2048", "2*11"), (r"3.1\times 10^{14}", "3.1 + 10^14"), ("y^{12}", "12y"),
        (r"\frac{1}{23}", r"\frac123"),
    ],
    "spaces": [("4", r"4\;5"), ("4", r"4\ y")],
    "names": [
        ("(4,6)", "x=6, y=4"), ("(4,6)", "x=4"), ("(4,6)", "x=4, y=6, z=1"), ("[4,6]", "x=4, y=6"), ("x=9", "9=y"),
    ],
    "dressing": [
        ("9", r"\color{9}{8}"), ("9", r"8\tag{9}"), ("9", r"\underline{8}"), (r"\frac29", r"{9\over 2}"),
        ("20", r"{3\choose 6}"), (r"\frac59", r"0.\dot{6}"), (r"\frac59", "0.555"), ("9", "9\u200b0"),
        ("x", r"\dot{x}"),
    ],
    "times": [("5:45", "5:54"), (r"5:45\text{ PM}", r"5:45\text{ AM}"), ("5:45", "5.45"),
        (r"5:45\text{ AM}", "17:45"), (r"2\text{ h }20\text{ min}", r"2\text{ h }2\text{ min}"),
        (r"20\text{ min}, 30\text{ min}", r"50\text{ min}"),
    ],
    "functions": [
        ("e^{3x}", r"\exp(x)"), (r"\sin 4x", r"2\sin x\cos x"), (r"\sin 4x", r"4\sin x"), ("y", r"\sqrt{y^2}"),
        ("|y|", r"\sqrt{y}^2"), (r"\frac{m(m-1)}{2}", r"\binom{m+1}{2}"), ("144", "57+87"),
    ],
    "matrices": [
        (r"\begin{pmatrix}5&6\\7&8\end{pmatrix}", "[[5,7],[6,8]]"),
        (r"\begin{pmatrix}5&6\\7&8\end{pmatrix}", "[5,6,7,8]"),
        (r"\begin{pmatrix}5&10\\15&20\end{pmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"), ("[5,6]", "(5,6)"),
    ],
    "words": [
        (r"9\text{th}", "eighth"), (r"9\text{th}", "nineteenth"), (r"\frac19", "ninth"),
        (r"\text{June }7", r"\text{June 8}"),
        (r"\text{June }7", r"\text{7 July}"), (r"\text{Yes}", r"\text{Yes, it is not}"),
        (r"\text{Yes}", r"\text{Yes and no}"),
        (r"\text{No}", r"\text{Yes, it is}"), (r"\text{green, blue}", r"\text{green and red}"),
        ("305", "three hundred fifty"),
        (r"\text{green, blue}", r"\text{green}"), (r"\text{even}", r"\text{it is not even}"), ("5", "two three"),
    ],
    "percentages": [(r"16\frac23\%", r"\frac{50}{3}"), (r"16\frac23\%", r"16\%"), (r"16\frac23\%", r"\frac{2}{3}\%")],
    "sets": [
        (r"\{\emptyset\}", r"\emptyset"), (r"\emptyset", r"\{\emptyset\}"), (r"\{\{1\}\}", r"\{1\}"),
        (r"\{\{1\}, 2\}", r"\{1, 2\}"),
        (r"\{\{1,2\}\}", "1,2"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_what_means_the_same(name):
    assert [pair for pair in RIGHT[name] if not judge(*pair)] == []


@pytest.mark.parametrize("name", WRONG)
def test_what_means_something_else(name):
    assert [pair for pair in WRONG[name] if judge(*pair)] == []


def test_a_multiple_of_the_questions_matrix_is_left_to_be_done():
    wanted, answer = r"\begin{pmatrix}5&10\\15&20\end{pmatrix}", r"5\begin{pmatrix}1&2\\3&4\end{pmatrix}"
    assert not judge(wanted, answer, rf"Compute ${answer}$.")
    assert not judge(wanted, answer, r"Let $\mathbf{A} = \begin{pmatrix}1&2\\3&4\end{pmatrix}$. Find $5 \mathbf{A}$.")
    assert judge(wanted, answer, "Find the inverse.")


MARKED = [
    ("答案：42", True), ("所以答案是42。", True), ("因此，最终答案为 **42**。", True), ("答：42", True),
    ("La respuesta es 42.", True), ("**Respuesta final:** $42$", True), ("El resultado es 42.", True),
    ("答案不是42", False), ("错误答案：42", False),
    ("答案：42或43", False), ("答案是42吗？", False), ("答案：42。不对，答案是43。", False),
    ("La respuesta incorrecta es 42.", False), ("La respuesta no es 42.", False),
    ("La respuesta es 42 o 43.", False), ("La respuesta podría ser 42.", False),
]  # fmt: skip


@pytest.mark.parametrize(("text", "right"), MARKED)
def test_answers_marked_in_chinese_and_spanish(text, right):
    assert MathReward()([Prompt(0, (1,), "", "42")], [text])[0].reward == right


def test_choices_marked_in_chinese_and_spanish():
    assert chosen("答案：B") == chosen("所以答案为 B。") == chosen("La respuesta correcta es B.") == "B"
    assert chosen("La respuesta es A o B.") is None


@pytest.mark.parametrize("block", ["```\n", "```python\nx = (\n```\n", "```\nthe answer is 5\n```\n", "~~~ a\n"])
def test_fences_take_no_time(block):
    started = time.thread_time()
    extract_code(block * (160_000 // len(block)))
    MathReward()([Prompt(0, (1,), "", "42")], [block * (160_000 // len(block))])
    assert time.thread_time() - started < 1
