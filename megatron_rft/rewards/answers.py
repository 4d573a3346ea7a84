r"""Where a response says its answer, and the comparisons that need no algebra.

The answer is what the last marker holds, "\boxed{...}" or "#### ...". Both are then brought to one form, so that
"#### $1,234 dollars." and "\boxed{1234}" compare equal. Text only: nothing here imports sympy.
"""

import re

BOXES = ("\\boxed{", "\\fbox{")
INTEGER = re.compile(r"-?(\d{1,15}|[1-9]\d{0,2}(,\d{3}){1,4})")  # 17, -3, 1,234: not 12,34
QUANTITY = re.compile(  # $1,234.50 dollars: a number between a currency sign and plain words
    r"(?P<sign>-?)[$€£]?\s*(?P<number>-?(\d+|[1-9]\d{0,2}(,\d{3})+)(\.\d+)?)(?P<percent>\s*%)?(\s+[A-Za-z][A-Za-z ]*)?"
)
SCIENTIFIC = re.compile(r"(-?(?:\d+\.?\d*|\.\d+))[eE]\+?(-?\d{1,3})")  # 4.5e33; e alone is Euler's number
WORDS = re.compile(r"[A-Za-z][A-Za-z']+( [A-Za-z']+)*")


def final_answer(text: str) -> str | None:
    """The marked answer of a response in its one form; None where it marks none (or leaves the box open)."""
    box = max(text.rfind(opening) for opening in BOXES)
    hashes = text.rfind("####")
    if box < 0 and hashes < 0:
        return None
    found = _boxed(text[box:]) if box > hashes else text[hashes:].lstrip("#").strip(" \t").partition("\n")[0]
    return None if found is None else normalise(found) or None


def _boxed(text: str) -> str | None:
    r"""The content of the box that `text` begins with, braces in balance: "\boxed{\frac{1}{2}} cm" -> "\frac{1}{2}"."""
    start = text.index("{")
    depth = 0
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start + 1 : place]
    return None


def normalise(answer: str) -> str:
    """Without outer dollar signs, a final full stop, and the currency or unit words around a plain number."""
    answer = answer.strip()
    if len(answer) > 1 and answer[0] == answer[-1] == "$" and "$" not in answer[1:-1]:
        answer = answer[1:-1].strip()
    answer = answer.removesuffix(".").strip()
    quantity = QUANTITY.fullmatch(answer)
    if quantity is None:
        return answer
    return quantity["sign"] + quantity["number"] + ("%" if quantity["percent"] else "")


def as_latex(answer: str) -> str:
    r"""What the algebra reads. Words are text: otherwise "Paris" is a product of letters, and "Pairs" is the same."""
    if WORDS.fullmatch(answer):
        answer = f"\\text{{{answer}}}"
    elif scientific := SCIENTIFIC.fullmatch(answer):
        answer = f"{scientific[1]} \\times 10^{{{int(scientific[2])}}}"
    return f"\\boxed{{{answer}}}"


def compare_exactly(reference: str, answer: str) -> bool | None:
    """True or False where the two texts settle it, None where algebra must: "0.5" against "1/2"."""
    if reference == answer:
        return True
    if INTEGER.fullmatch(reference) and INTEGER.fullmatch(answer):
        return int(reference.replace(",", "")) == int(answer.replace(",", ""))
    return None
