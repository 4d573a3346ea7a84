r"""Searches for rewarded answers that are the question in disguise: python tools/bench/disguises.py FOLDER [ROWS]

Each formula of a question (of GSM8K: the last calculation of its solution) is rewritten by up to three valid rewrites
of a grammar of 36, chosen at random, TRIES times; a row is bought if one of them is graded as right. FOLDER holds rows
as JSON lines (math_test.jsonl, gsm8k_train.jsonl ...); sums of two numbers are made up. Prints how many rows were
bought, each with its answer.
"""

import json
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from megatron_rft.rewards.equivalence.disguise import MATHS
from megatron_rft.rewards.equivalence.reader import read
from megatron_rft.rewards.equivalence.trees import value_of
from megatron_rft.rewards.math import judge, reference_form

SMALLEST = "{rows} 2"  # tests/bench
TRIES = 40  # rewritten formulas of a row
MATH = {"math_test": "solution", "math500": "answer", "gaokao2023en": "answer", "college_math": "answer"}
NUMBER = re.compile(r"(?<![\d.\\{_^a-zA-Z])\d+(?![\d.}])")
LETTER = re.compile(r"(?<![\\a-zA-Z{])[a-zA-Z](?![a-zA-Z}])")
WHOLE = [  # of the formula F
    "(F)", "{F}", "F+0", "0+F", r"F\cdot 1", r"1\cdot (F)", "(F)^1", "(F)^{2-1}", "-(-(F))", r"\frac{F}{1}",
    r"\frac{2(F)}{2}", r"\sqrt{(F)^2}", r"\sqrt[3]{(F)^3}", r"\gcd(F,F)", r"\log_{10} 10^{F}", r"\lfloor F \rfloor",
    r"\binom{F}{1}", r"\int_0^1 (F) dt", r"\sum_{k=1}^1 (F)", r"e^{\ln(F)}", r"2(F)-(F)", r"\frac{(F)^2}{F}",
    r"\tan(\arctan(F))", "F+x-x", r"\frac{d}{dq}((F)q)",
]  # fmt: skip
PARTS = [(NUMBER, each) for each in ("N.0", "(N)", "{N}", "N^1", r"\frac{2\cdot N}{2}", "(N+1-1)", r"\sqrt{N^2}")]
PARTS += [(LETTER, each) for each in ("(N)", "N^1")]


def swapped(formula: str, choose: random.Random) -> str:
    """Exchange two terms or factors that stand side by side."""
    sign = choose.choice([r"\+", r"\\cdot", r"\\times"])
    simple = r"((?:\\[a-z]+)?[\w^{}]+)"
    return re.sub(rf"{simple}\s*({sign})\s*{simple}", r"\3 \2 \1", formula, count=1)


def renamed(formula: str, choose: random.Random) -> str:
    """Rename a variable of integration."""
    found = re.search(r"\bd([xtu])\b", formula)
    return re.sub(rf"(?<![\\a-zA-Z]){found[1]}\b|(?<=d){found[1]}\b", "v", formula) if found else formula


def rewritten(formula: str, choose: random.Random) -> str:
    """Apply one rewrite."""
    how: Callable | str | tuple = choose.choice([*WHOLE, *PARTS, swapped, renamed])
    if isinstance(how, str):
        return how.replace("F", formula)
    if callable(how):
        return how(formula, choose)
    places = list(how[0].finditer(formula))
    if not places:
        return formula
    place = choose.choice(places)
    return formula[: place.start()] + how[1].replace("N", place[0]) + formula[place.end() :]


def rows(folder: Path, count: int) -> Iterator[tuple[str, str, str, list[str]]]:
    """Yield (kind, question, reference, formulas): `count` rows of each kind of mathematics."""
    made = [(row, field) for name, field in MATH.items() for row in table(folder / f"{name}.jsonl")]
    for row, field in spread(made, count):
        question = next((row[key] for key in ("problem", "question") if isinstance(row.get(key), str)), "")
        found = [next(filter(None, groups)) for groups in MATHS.findall(question)]
        if isinstance(row.get(field), str) and row[field].strip():
            formulas = [side for each in found for side in (each, *each.split("="))]
            yield "formulas of questions", question, reference_form(row[field]), formulas
    for row in spread(table(folder / "gsm8k_train.jsonl"), count):
        last = re.findall(r"<<([^<>=]*)=", row["answer"])[-1:]
        formulas = [each.replace("*", r"\cdot ") for each in last]
        yield "GSM8K", row["question"], reference_form(row["answer"]), formulas
    choose = random.Random(0)
    for _ in range(count):
        a, b = choose.randrange(10, 1000), choose.randrange(10, 1000)
        yield "sums", f"What is {a} + {b}?", str(a + b), [f"{a} + {b}"]


def table(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def spread(made: list, count: int) -> list:
    return made[:: max(len(made) // count, 1)][:count]


def is_given(reference: str, formula: str) -> bool:
    """Whether the question says the answer as it is, also as the last member of an equation: "Let x = -1."."""
    trees = read(reference), read(formula)
    return None in trees or trees[0] == value_of(trees[1])


def bought(question: str, reference: str, formulas: list[str], choose: random.Random) -> str | None:
    formulas = [each for each in formulas if not is_given(reference, each)]
    for _ in range(TRIES if formulas else 0):
        answer = choose.choice(formulas)
        for _ in range(choose.randint(1, 3)):
            answer = rewritten(answer, choose)
        if len(answer) < 1000 and judge(reference, answer, question):
            return answer
    return None


def main() -> None:
    folder, count = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1000
    seen, found = Counter(), []
    for kind, question, reference, formulas in rows(folder, count):
        seen[kind] += 1
        if answer := bought(question, reference, formulas, random.Random(f"{question}{reference}")):
            found.append((kind, f"{reference!r} by {answer!r}: {question[-160:]!r}"))
    print("| rows | number | bought |\n|---|---|---|")
    for kind, number in seen.items():
        print(f"| {kind} | {number} | {sum(each == kind for each, _ in found)} |")
    print("\n".join(text for _, text in found))


if __name__ == "__main__":
    main()
