r"""Compares graders of mathematics on references of real benchmarks: python tools/bench/graders.py FOLDER [ROWS]

With a folder of sampled responses to "What is 57 + 87? ..." (megatron-rft generate examples/smollm2/trajectories.yaml)
it compares `ours` with rules for such questions alone, and prints each response on which they differ.

Each reference is written in other ways that mean the same, and as answers that are wrong; a grader errs by a false
negative on the former and a false positive on the latter. FOLDER holds rows as JSON lines (math500.jsonl ...).

    ours           reward.kind=math with reward.answer=marked
    math-verify    its `parse` and `verify`, as its README calls them
    qwen rules     the rules of Qwen2.5-Math's evaluation: its order of tests, written anew (about 1e-4 for numbers, a
                   percentage is its hundredth and its hundredfold, brackets and units do not count, sympy for the rest)
"""

import json
import logging
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from math import isclose
from pathlib import Path

import pyarrow.parquet as pq

from megatron_rft.data.prompts import reference_answer
from megatron_rft.records import Prompt
from megatron_rft.rewards.equivalence import trees
from megatron_rft.rewards.equivalence.reader import read
from megatron_rft.rewards.math import MathReward, reference_form

SMALLEST = "{rows} 2"  # tests/bench
FILES = {
    "math500": "answer", "math_test": "solution", "gaokao2023en": "answer", "olympiadbench": "final_answer",
    "aime24": "answer", "aime25": "answer", "amc23": "answer", "gsm8k_test": "answer",
    "college_math": "answer", "carp_en": "answer", "minerva_math": "solution",
}  # fmt: skip
QUESTION = ("problem", "question", "content")
Case = tuple[str, str, str, str, bool]  # how it is made, question, reference, response, whether it is right
SYMBOL = re.compile(r"\\[a-zA-Z]+|[a-zA-Z]")
FRACTION = re.compile(r"\\[dt]?frac\{([^{}]+)\}\{([^{}]+)\}")


def number(text: str) -> trees.Fraction | None:
    """Return the value of a written number or fraction."""
    tree = read(text)
    if tree is None:
        return None
    found = trees.value(tree) if tree[0] in "n*^" and not trees.symbols(tree) else None
    return tree[1] if tree[0] == "n" else found if isinstance(found, trees.Fraction) else None


def plain(text: str) -> str:
    """The answer without sizes of brackets and spaces."""
    return re.sub(r"\\left|\\right|\\[,;!]|\$", "", text).strip()


def references(folder: Path, rows: int) -> Iterator[tuple[str, str]]:
    """Return (question, reference) for `rows` rows of each file, without empty references."""
    for name, field in FILES.items():
        path = folder / f"{name}.jsonl"
        table = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
        for row in table[:: max(len(table) // rows, 1)][:rows]:
            answer = reference_form(re.sub(r"solution:$", "", reference_answer(row[field])))
            question = next((row[key] for key in QUESTION if key in row), "")
            if answer:
                yield question, answer


def equivalents(reference: str) -> Iterator[tuple[str, str]]:
    """Return other ways to write the reference with the same meaning."""
    bare = reference.strip("$") if reference.count("$") == 2 else reference
    yield "boxed", rf"So the answer is $\boxed{{{bare}}}$."
    yield "answer is", f"Therefore, the answer is ${bare}$."
    yield "display", f"\\[\\boxed{{{bare}}}\\]"
    spaced = bare if "begin" in bare or "\\!" in bare or number(bare) else re.sub("([+=,])", r" \1 ", bare)
    yield "more spaces", rf"\boxed{{ {spaced} }}"
    if "\\frac" in bare:
        yield "dfrac", "\\boxed{" + bare.replace("\\frac", "\\dfrac") + "}"
    if FRACTION.fullmatch(bare):
        upper, lower = FRACTION.fullmatch(bare).groups()
        yield "slash", rf"\boxed{{({upper})/({lower})}}"
        if upper.isdecimal() and lower.isdecimal():
            yield "multiplied", rf"\boxed{{\frac{{{3 * int(upper)}}}{{{3 * int(lower)}}}}}"
    if re.match(r"^\(.*\)$", bare) and bare.count("(") == 1:
        yield "sized brackets", rf"\boxed{{\left{bare[:-1]}\right)}}"
    yield from _numbers(bare)
    if re.fullmatch(r"[-\d\\a-z^{}+ /]*", bare) and "begin" not in bare and "text" not in bare:
        yield "named", rf"\boxed{{x = {bare}}}"
        if number(bare) is None and "circ" not in bare:
            yield "plus zero", rf"\boxed{{0 + {bare}}}"
    parts = bare.replace("$", "").split(",")
    if len(parts) > 1 and not re.search(r"[()\[\]\\{]", bare) and not number(bare.replace("$", "")):
        yield "another order", rf"\boxed{{{', '.join(reversed(parts))}}}"
        yield "with and", rf"\boxed{{{', '.join(parts[:-1])} \text{{ and }} {parts[-1]}}}"


def _numbers(bare: str) -> Iterator[tuple[str, str]]:
    found = number(bare)
    if found is None or getattr(found, "percent", False):
        return
    if found.denominator == 1 and abs(found) >= 1000:
        grouped = f"{int(found):,}"
        yield "thousands", "\\boxed{" + grouped.replace(",", "{,}") + "}"
        yield "thin spaces", "\\boxed{" + grouped.replace(",", "\\,") + "}"
    if found.denominator == 1:
        yield "a unit", rf"\boxed{{{int(found)} \text{{ units}}}}"
        yield "decimal", rf"\boxed{{{int(found)}.0}}"
        yield "last line", f"We see it.\n\n{int(found)}"
    elif 10**6 % found.denominator == 0:
        yield "decimal", rf"\boxed{{{float(found)}}}"
    if getattr(found, "places", None):
        yield "fraction", rf"\boxed{{\frac{{{found.numerator}}}{{{found.denominator}}}}}"


def wrong_answers(question: str, reference: str, other: str) -> Iterator[tuple[str, str]]:
    """Return wrong answers."""
    bare = reference.strip("$") if reference.count("$") == 2 else reference
    clean = plain(bare)
    found = number(clean)
    if plain(other) != clean:
        yield "another row's", rf"\boxed{{{other.strip('$')}}}"
        yield "hedged", rf"\boxed{{{bare.replace('$', '')} \text{{ or }} {other.replace('$', '')}}}"
        yield "two boxes", rf"\boxed{{{bare}}} or \boxed{{{other.strip('$')}}}"
    if digits := list(re.finditer(r"\d+", bare)):
        last = digits[-1]
        changed = bare[: last.start()] + str(int(last[0]) + 1) + bare[last.end() :]
        if number(changed) is None or number(changed) != found:
            yield "a digit changed", rf"\boxed{{{changed}}}"
    if found and not getattr(found, "percent", False):
        value = int(found) if found.denominator == 1 else float(found)
        yield "negative", rf"\boxed{{{-value}}}"
        if "percent" not in question and "%" not in question:
            yield "percent", rf"\boxed{{{value}\%}}"
        yield "a letter", rf"\boxed{{{value}y}}"
        yield "false equation", rf"\boxed{{{value + 1} = {value}}}"
        yield "another base", rf"\boxed{{{value}_{{7}}}}"
        yield "approximation", rf"\boxed{{{clean} \approx {value + 5}}}"
    if not re.search(r"[=|]|\\(?:text|math|begin|in)", bare):
        rest = SYMBOL.sub(lambda match: match[0] if len(match[0]) > 1 else "", bare)
        if rest != bare and re.search(r"\d", rest):
            yield "symbols left out", rf"\boxed{{{rest}}}"
    if "\\pi" in clean or "\\sqrt" in clean:
        yield "rounded", rf"\boxed{{{_rounded(clean) or 3.14159265}}}"
    if re.fullmatch(r"\[.*\]|\(.*\]|\[.*\)", clean):
        yield "open", rf"\boxed{{({clean[1:-1]})}}"
    points = re.fullmatch(r"\(([^(),]+),([^(),]+)\)", clean)
    if points and points[1].strip() != points[2].strip():
        yield "swapped", rf"\boxed{{({points[2]}, {points[1]})}}"
    parts = clean.split(",")
    if len(parts) > 1 and not re.search(r"[()\[\]\\{=]", clean) and found is None:
        yield "one is missing", rf"\boxed{{{', '.join(parts[:-1])}}}"


def _rounded(clean: str) -> str:
    tree = read(clean)
    found = trees.value(tree) if tree else None
    return "" if found is None or found != found.real else f"{float(found):.8f}"


def cases(folder: Path, rows: int) -> list[Case]:
    table = list(references(folder, rows))
    found: dict[Case, None] = {}
    for (question, reference), (_, other) in zip(table, table[1:] + table[:1], strict=True):
        found |= {(how, question, reference, text, True): None for how, text in equivalents(reference)}
        found |= {
            (how, question, reference, text, False): None for how, text in wrong_answers(question, reference, other)
        }
    return list(found)


def ours(table: list[Case]) -> list[bool]:
    reward = MathReward()
    prompts = [Prompt(k, (1,), "", case[2], {}, case[1]) for k, case in enumerate(table)]
    scores = reward(prompts, [case[3] for case in table])
    reward.close()
    return [score.reward == 1.0 for score in scores]


def math_verify(table: list[Case]) -> list[bool]:
    from math_verify import parse, verify

    return [verify(parse(f"${case[2].strip('$')}$"), parse(case[3])) for case in table]


def qwen_rules(table: list[Case]) -> list[bool]:
    return [_qwen(_plain(_extracted(case[3])), _plain(case[2])) for case in table]


def _extracted(text: str) -> str:
    """Return the last box, else the text after "he answer is", else the last number."""
    if "boxed" in text:
        rest, depth = text.split("boxed")[-1], 0
        for place, letter in enumerate(rest):
            depth += {"{": 1, "}": -1}.get(letter, 0)
            if depth == 0:
                return rest[1:place]
        return rest
    if "he answer is" in text:
        return text.split("he answer is")[-1].strip().removesuffix(".")
    return (re.findall(r"-?\d*\.?\d+", text.replace(",", "")) or [""])[-1]


def _plain(text: str) -> str:
    text = re.sub(
        r"\\!|\\left|\\right|\\\$|\$|\^\{?\\circ\}?|\\%|%|\\text\{.*?\}$|\\mbox\{.*?\}|\n", "", text.rstrip(".")
    )
    text = re.sub(r"\\[td]frac", r"\\frac", text).replace("\\{", "{").replace("\\}", "}").replace("bmatrix", "pmatrix")
    text = re.sub(r"\\text\{(.*?)\}", r"\1", text)
    text = re.sub(r"[xyz]\s*=|\band\b|\bunits\b", "", text)
    text = re.sub(r"(\d+)\.0*([^\d]|$)", r"\1\2", text)
    parts = text.split("=")
    text = parts[1] if len(parts) == 2 and len(parts[0].strip()) <= 2 else text
    return re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", text.replace(" ", ""))


def _qwen(answer: str, reference: str) -> bool:
    if answer.lower() == reference.lower():
        return True
    numbers = [_float(answer), _float(reference)]
    if None not in numbers:
        return any(isclose(numbers[1] * scale, numbers[0], rel_tol=1e-4) for scale in (0.01, 1, 100))
    if re.sub(r"[{}()]", "", answer).lower() == re.sub(r"[{}()]", "", reference).lower():
        return True
    if all(re.match(r"[(\[].+[)\]]", text) for text in (answer, reference)):
        pair = [text[1:-1].split(",") for text in (answer, reference)]
        return len(pair[0]) == len(pair[1]) and all(map(_qwen, *pair))
    matrix = r"\\begin\{pmatrix\}(.*)\\end\{pmatrix\}"
    if all(re.fullmatch(matrix, text) for text in (answer, reference)):
        pair = [re.split(r"\\\\|&", re.fullmatch(matrix, text)[1]) for text in (answer, reference)]
        return len(pair[0]) == len(pair[1]) and all(map(_qwen, *pair))
    return _symbolic(answer, reference)


def _float(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def _symbolic(answer: str, reference: str) -> bool:
    from latex2sympy2_extended.latex2sympy2 import latex2sympy
    from sympy import N, simplify

    try:
        a, b = latex2sympy(answer), latex2sympy(reference)
        if a == b or str(a) == str(b) or simplify(a - b) == 0:
            return True
        return isclose(float(N(a)), float(N(b)), rel_tol=1e-4)
    except Exception:
        return False


NUMBER = r"(-?\d[\d,]*(?:\.\d+)?)(?![\d,.]*\d)"
SAYS = rf"(?:=|\bis|\bequals?|\bequal to|\bgives?|\bget|\bbe|\bhave|\bare|:)[\s*$]*{NUMBER}"


def sum_of(question: str) -> re.Match:
    return re.search(r"(\d+) ([+-]) (\d+)", question)


def by_hand(question: str, text: str) -> str | None:
    """Return the result that a response to "What is 57 + 87?" gives, by rules for such questions alone.

    It is what the response calls the answer; else what its last line ends with, after a word or sign of equality or
    alone; else what it says that the sum is.
    """
    text = re.sub(r"[\s.!]*$", "", re.sub(r'[*\\$"`]', "", text))
    called = re.findall(rf"answer(?: to [^.=:]*)?(?: is|:)\s*{NUMBER}(?=\s*(?:[.,\n]|$))", text, re.I)
    last = re.sub(r"\.\s+[^.\d]*$", "", text.splitlines()[-1]) if text else ""  # without a sentence that has no number
    alone = re.fullmatch(NUMBER, last.strip()) or re.search(rf"{SAYS}$", last)
    asked = r"\s*".join(map(re.escape, sum_of(question).groups()))
    said = re.findall(rf"(?<![\d.]){asked}\s*(?:=|is|equals)\s*{NUMBER}(?!\s*[-+*/\d])", text)
    found = called[-1:] or ([alone[1]] if alone else []) or said[-1:]
    return found[0].replace(",", "") if found else None


def sampled(folder: Path) -> None:
    """Print how many of a store's responses are right by each grader, and where they differ."""
    rows = [row for path in sorted(folder.glob("shards/*.parquet")) for row in pq.read_table(path).to_pylist()]
    reward = MathReward()
    prompts = [
        Prompt(k, (1,), row["prompt"], row["answer"], question=sum_of(row["prompt"])[0]) for k, row in enumerate(rows)
    ]
    ours = [score.reward == 1.0 for score in reward(prompts, [row["text"] for row in rows])]
    reward.close()
    hand = []
    for row in rows:
        result = by_hand(row["prompt"], row["text"])
        hand.append(result is not None and float(result) == float(row["answer"]))
    differ = [(row, by) for row, by, other in zip(rows, ours, hand, strict=True) if by != other]
    print("| responses | right by ours | right by the rules | differ |\n|---|---|---|---|")
    print(f"| {len(rows)} | {sum(ours)} | {sum(hand)} | {len(differ)} |")
    for row, right in differ:
        question = row["prompt"].splitlines()[-2]
        print(f"{'only ours' if right else 'only the rules'}: {question!r}: {row['answer']}: {row['text']!r}")


def main() -> None:
    if len(sys.argv) == 2 and (Path(sys.argv[1]) / "shards").is_dir():
        return sampled(Path(sys.argv[1]))
    folder, rows = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 60
    logging.disable(logging.CRITICAL)
    table = cases(folder, rows)
    right = sum(case[4] for case in table)
    print(f"{right} equivalents, {len(table) - right} wrong answers")
    graders: dict[str, Callable] = {"ours": ours, "math-verify": math_verify, "qwen rules": qwen_rules}
    if find_spec("math_verify") is None:  # which brings the qwen rules' latex2sympy2_extended too
        print("left out: math-verify, qwen rules (pip install -e .[bench])")
        graders = {"ours": ours}
    print("| grader | false negatives | false positives | seconds |\n|---|---|---|---|")
    details = []
    for name, grade in graders.items():
        start = time.perf_counter()
        verdicts = grade(table)
        seconds = time.perf_counter() - start
        errors = [(case, said) for case, said in zip(table, verdicts, strict=True) if said != case[4]]
        kinds = Counter((case[4], case[0]) for case, _ in errors)
        negatives = sum(case[4] for case, _ in errors)
        print(f"| {name} | {negatives} | {len(errors) - negatives} | {seconds:.0f} |", flush=True)
        details.append(
            f"\n{name}: "
            + ", ".join(f"{how} {count} ({'-' if is_right else '+'})" for (is_right, how), count in kinds.items())
        )
        for (how, _, reference, text, is_right), _ in errors[: 40 if name == "ours" else 0]:
            details.append(f"  {'false negative' if is_right else 'false positive'}, {how}: {reference!r}: {text!r}")
    print("\n".join(details))


if __name__ == "__main__":
    main()
