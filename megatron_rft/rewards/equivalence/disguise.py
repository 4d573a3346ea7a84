r"""Whether an answer with the reference's value is an answer, or the question (or a calculation) in disguise.

1. The reference's own tree (trees.py) is an answer. Lists are judged member by member, equations by their last member.
2. Kind. A reference that is a number takes a numeral: 17, -3.5, 6 2/3, 3 * 10^8; one power, factorial or binomial, also
   plus or minus 1, whose numbers do not all stand in the question; an integer takes no fraction. Other references take
   no integral, derivative, sum, function, symbol or plain arithmetic that they lack; with n operations at most 4n + 8.
   What is solved for a number stays solved.
3. Echo. Against each formula of the question with the reference's value and another tree: the answer is not its tree,
   nor as large in every count; and in each count in which the formula is above the reference - functions, numbers under
   roots, products of sums, terms, fractions, roots below the bar, negative powers, degrees; if in none, operations,
   arithmetic, symbols, sizes of numbers - the answer has come at least half of the way down.
"""

import re
from collections import Counter
from fractions import Fraction
from functools import lru_cache

from megatron_rft.rewards.equivalence import trees
from megatron_rft.rewards.equivalence.compare import measured, members, same
from megatron_rft.rewards.equivalence.reader import TRIGONOMETRY, is_name, read
from megatron_rft.rewards.equivalence.trees import DEGREE, MINUS, Tree, is_number, is_numeral, nodes, ratio, value_of

# Between dollar signs of TeX: "$204 + $160" are amounts.
MATHS = re.compile(
    r"\$\$(.+?)\$\$|\$(?!\s)([^$\n]+)(?<!\s)\$(?!\d)|\$(?=\s)([^$\n]+)(?<=\s)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL
)
# Of a question: what stands between its formulas.
PROSE = re.compile(
    r"(?<![\\{a-zA-Z])(?:[A-Za-z]{3,}|is|of|if|to|in|at|by|we|as|be|do|an|or|on|so|it|no)(?![a-zA-Z{])[,.?]?"
)
WRITES_ANOTHER = re.compile("decimal|percent|mixed|fraction")
LOGARITHMS = {"ln", "log", "lg"}
COUNTS = {"binom", "!"}  # polynomials and quotients as well
ROOTS = {"abs", "root"}
SIZES = {"operations", "symbols", "sizes", "arithmetic"}
MOST = 60  # formulas of a question


def disguised(wanted: Tree, got: Tree, question: str) -> bool:
    """Whether an answer with the reference's value is none."""
    if got[0] == "*" and wanted[0] in ("matrix", "()"):  # 2 A, unless the question has A
        given = [each for formula in formulas(question) for each in nodes(formula)]
        return any(each in given for each in got[1:] if each[0] == wanted[0])
    ours, theirs = members(wanted), members(got)
    partners = [next((k for k in ours if same(value_of(k), value_of(each))), ours[0]) for each in theirs]
    return any(_disguised(one, other, question) for one, other in zip(partners, theirs, strict=True))


def has_another_kind(goal: Tree, tree: Tree, question: str) -> bool:
    """Whether an answer is not of the reference's kind."""
    if DEGREE in nodes(goal) and ("s", r"\pi") in nodes(tree):
        return False
    if is_number(goal):
        quotient = trees.is_whole(goal) and any(each[0] == "^" and each[2] == MINUS for each in nodes(tree))
        return not is_numeral(tree) or quotient or _is_calculation(tree, question)
    if _functions(tree) - _functions(goal) - COUNTS or trees.symbols(tree) - trees.symbols(goal):
        return True
    ours, theirs = measure(goal), measure(tree)
    undone = theirs["arithmetic"] and not ours["arithmetic"]
    return bool(undone) or theirs["operations"] > 4 * ours["operations"] + 8


@lru_cache(256)
def formulas(question: str) -> list[Tree]:
    """The question's formulas: what stands between dollar signs, and between words."""
    texts = [next(filter(None, groups)) for groups in MATHS.findall(question)]
    texts += PROSE.sub("?", re.sub(r"\\[()\[\]]|\$", " ", question)).split("?")
    found: dict[Tree, None] = {}
    for text in list(dict.fromkeys(each.strip(" .:,;\n") for each in texts))[: 2 * MOST]:
        tree = read(text)
        for part in [*members(tree), tree] if tree else ():
            found |= dict.fromkeys((part, *(part[2:] if part[0] in ("=", "<") else ())))
    return [each[1] if each[0] == "unit" else each for each in found][:MOST]


def _sides(tree: Tree) -> Tree:
    """Give the sides of an equation an order; anything else stays as it is."""
    return ("f", "=", *sorted(tree[2:], key=repr)) if tree[0] == "=" and len(tree) == 4 else tree


def _disguised(wanted: Tree, got: Tree, question: str) -> bool:
    solved = wanted[0] == "=" and len(wanted) == 4 and is_name(wanted[2]) and not trees.symbols(wanted[-1])
    if solved and got[0] == "=" and not is_name(got[2]):
        return True
    if solved or not wanted[0] == got[0] == "=":
        wanted, got = value_of(wanted), value_of(got)
        got = measured(got)[1] if wanted[0] == "n" and measured(got)[0] == "unit" else got
    goal, tree = _sides(wanted), _sides(got)
    if tree == goal or goal[0] == "text":
        return False
    if has_another_kind(goal, tree, question):
        return True
    lowest = tree[0] == "n" or (ratio(tree) is not None and measure(tree)["sizes"] <= measure(goal)["sizes"])
    if is_number(goal) and lowest and not WRITES_ANOTHER.search(question):
        return False
    return any(_echo(_sides(each), goal, tree) for each in formulas(question))


def _echo(formula: Tree, goal: Tree, answer: Tree) -> bool:
    """Whether the answer is nearer to the question's formula than to the reference."""
    equation = formula[:2] == ("f", "=")
    if equation != (goal[:2] == ("f", "=")) or formula == goal:
        return False
    counts, ours, theirs = map(measure, (formula, goal, answer))
    asked = [k for k in counts if counts[k] > ours[k]]
    kinds = [k for k in asked if k not in SIZES]
    padded = asked and formula[0] != "n" and all(theirs[k] >= counts[k] for k in counts)
    if counts["operations"] != ours["operations"] and "sizes" in asked:
        asked.remove("sizes")  # of the numbers of a fraction to be reduced
    near = formula == answer or padded or any(2 * theirs[k] > counts[k] + ours[k] for k in kinds or asked)
    return bool(near) and (trees.proportional(goal[2:], formula[2:]) if equation else trees.equal(goal, formula))


def _is_calculation(tree: Tree, question: str) -> bool:
    """Whether a power, factorial or binomial has no other numbers than the question."""
    if not any(each[0] == "f" or (each[0] == "^" and each[2] != MINUS) for each in nodes(tree)):
        return False
    given = {Fraction(each.replace(",", "")) for each in re.findall(r"\d[\d,]*(?:\.\d+)?", question)}
    numbers = [abs(each[1]) for each in nodes(tree) if each[0] == "n" and each != MINUS]
    return all(each in given for each in numbers) or (tree[0] == "+" and 1 in given)


@lru_cache(4096)
def measure(tree: Tree) -> Counter[str]:
    """Count what work on a formula brings down."""
    count: Counter[str] = Counter(terms=max([len(each) - 1 for each in nodes(tree) if each[0] == "+"], default=1))
    count["unsolved"] = tree[:2] == ("f", "=") and not any(map(is_name, tree[2:]))
    _count(tree, count, root=False)
    return count


def _count(tree: Tree, count: Counter[str], *, root: bool) -> None:
    kind, parts = tree[0], [each for each in tree[1:] if isinstance(each, tuple)]
    if kind == "n":
        size = tree[1].numerator.bit_length() + (tree[1].denominator.bit_length() if tree[1].denominator > 1 else 0)
        count.update(sizes=size, radicand=size * root)
    elif kind == "s":
        count["degrees" if tree[1] == "°" else "symbols"] += 1
    elif kind == "^":
        _count_power(tree, count, root)
    else:
        parts = [each for each in parts if kind != "*" or each != MINUS]
        inverse = [each for each in parts if kind == "*" and each[0] == "^" and each[2] == MINUS]  # a / b is one
        sums = any(each[0] == "+" for each in parts)
        count["products"] += kind == "*" and sums and len(parts) > len(inverse) + 1
        count["operations"] += (len(parts) - 1 if kind in ("+", "*", ",", "()") else 1) - len(inverse)
        count["functions"] += kind == "f" and tree[1] != "="
        numbers = [each for each in parts if each not in inverse and is_numeral(each)]
        plain = [each for each in inverse if ratio(each)]
        count["arithmetic"] += kind in "+*" and max(len(numbers) - 1, 0) + max(len(plain) - 1, 0)
        for each in parts:
            _count(each, count, root=root)


def _count_power(tree: Tree, count: Counter[str], root: bool) -> None:
    exponent = tree[2][1] if tree[2][0] == "n" else None
    negative = exponent is not None and exponent < 0
    if exponent == -1 and tree[1][0] != "n":
        count.update(fractions=1, below=any(each == ("s", "i") or is_root(each) for each in nodes(tree[1])))
    count.update(operations=1, inverses=negative and exponent != -1)
    count["products"] += tree[1][0] in "+*" and trees.is_whole(tree[2]) and exponent > 1
    products = count["products"]
    _count(tree[1], count, root=root or is_root(tree))
    if negative:
        count["products"] = products  # below the bar it may stay: 1/((x - 1)(x + 1))
    if exponent is None:
        _count(tree[2], count, root=False)


def is_root(tree: Tree) -> bool:
    return tree[0] == "^" and tree[2][0] == "n" and tree[2][1].denominator > 1


def _functions(tree: Tree) -> set[str]:
    found = {each[1] for each in nodes(tree) if each[0] == "f"}
    found |= {"root" for each in nodes(tree) if is_root(each) and trees.symbols(each[1])}
    return {next((min(kin) for kin in (TRIGONOMETRY, LOGARITHMS, ROOTS) if each in kin), each) for each in found}
