r"""Compares an answer's tree with the reference's, part by part.

3, 5          several values, in any order; \{3, 5\} is the same
(3, 5)        in this order; brackets must be the same where one of them is square
x = 3         the value 3 where the reference has no equation; else the same equation or a multiple of it
2 = 3 = 4     counts by its last member, and is wrong where numbers contradict each other
50%           0.5; and 50 where the question asks for a percentage
"""

import re

from megatron_rft.rewards.equivalence import trees
from megatron_rft.rewards.equivalence.reader import EMPTY, TO, is_name
from megatron_rft.rewards.equivalence.trees import DEGREE, ONE, Numeral, Tree, nodes, rebuilt, times, value_of
from megatron_rft.rewards.equivalence.words import LETTERS, measures

ASKS_PERCENT = re.compile(r"(?<!\d)(?<!\d\s)(?<!\d\\)(?:percent|\\?%)", re.IGNORECASE)
LISTS = {",", "{}", "u"}
UNIT_SYMBOLS = {DEGREE, *(("s", letter) for letter in LETTERS)}


def counted(wanted: Tree, got: Tree) -> Tree:
    """The part of an answer that counts: of a chain its last member, or the one before a rounding of it."""
    if wanted[0] == "=" or got[0] != "=":
        return got
    before, last = got[-2:]
    return before if _rounds(before, last, got[1][-1]) and not same(wanted, last) else last


def same(wanted: Tree, got: Tree, percent: bool = False) -> bool:
    """Whether two answers are equivalent. `percent`: the question asks for a percentage."""
    if wanted == got or "text" in (wanted[0], got[0]):
        return wanted == got or (got[0] == "n" and wanted[1] == f"number {got[1]}")  # 5 for the fifth
    if wanted[0] == got[0] == "n":
        ours, theirs = (100 ** each[1].percent for each in (wanted, got))
        share = percent and ours != theirs and wanted[1] * ours == got[1] * theirs  # 50 and 50%
        return share or trees.equal(wanted, got)
    for rule in (_chains, _units, *((_lists,) if {wanted[0], got[0]} & LISTS else ()), _ordered):
        if (verdict := rule(wanted, got, percent)) is not None:
            return verdict
    return trees.equal(wanted, got)


def parameters(wanted: Tree, got: Tree) -> list[Tree]:
    """Leave out ", k \\in Z" of both; the answer's k gets the reference's name."""
    names = [[each[1] for each in nodes(tree) if each[0] == "in" and each[1][0] == "s"] for tree in (wanted, got)]
    if len(names[0]) == len(names[1]) == 1:
        got = replaced(got, {names[1][0]: names[0][0]})
    kept = [[each for each in tree[1:] if each[0] != "in"] if tree[0] == "," else [tree] for tree in (wanted, got)]
    return [each[0] if len(each) == 1 else (",", *each) for each in kept]


def replaced(tree: Tree, parts: dict[Tree, Tree]) -> Tree:
    return parts[tree] if tree in parts else rebuilt(tree, lambda each: replaced(each, parts))


def _chains(wanted: Tree, got: Tree, percent: bool) -> bool | None:
    """Compare equations and chains of equations."""
    if "=" not in (wanted[0], got[0]) or {wanted[0], got[0]} & LISTS:
        return None
    if got[0] == "=" and _contradicts(got):
        return False
    if wanted[0] != "=":
        return same(wanted, counted(wanted, got), percent)
    if got[0] != "=" or wanted[2] == got[2]:
        return (got[0] == "=" or is_name(wanted[2])) and same(wanted[-1], got[-1] if got[0] == "=" else got, percent)
    return len(wanted) == len(got) == 4 and trees.proportional(wanted[2:], got[2:])


def _contradicts(chain: Tree) -> bool:
    """Whether a chain contradicts itself, as 18 = 17. Roundings and unevaluated sums do not."""
    numbers = [each for each in map(value_of, chain[2:]) if each[0] == "n"]
    return any(a != b and not _rounds(a, b, chain[1]) for a, b in zip(numbers, numbers[1:], strict=False))


def _rounds(exact: Tree, written: Tree, signs: str) -> bool:
    """Whether a number rounds what stands before it in a chain."""
    value = trees.value(exact) if written[0] == "n" and (written[1].places or "~" in signs) else None
    if value is None or value != value.real:
        return False
    difference = abs(trees.number(value) - trees.number(written[1]))
    return bool(difference <= trees.number(Numeral(501, 1000)) / 10 ** (written[1].places or 0))


def _units(wanted: Tree, got: Tree, percent: bool) -> bool | None:
    """A unit may be left out; another one is wrong, and the same quantity in another unit is right."""
    wanted, got = _clock(wanted, got), _clock(got, wanted)
    ours, theirs = map(measured, (wanted, got))
    if "unit" not in (wanted[0], got[0]):
        if (DEGREE in nodes(wanted)) != (DEGREE in nodes(got)) and trees.symbols(wanted) == trees.symbols(got):
            plain = (replaced(each, {DEGREE: ONE}) for each in (wanted, got))
            return trees.equal(wanted, got) or same(*plain, percent)
        if wanted[0] == "n" and theirs[0] == "unit":
            return same(wanted, theirs[1], percent)
        if got[0] != "n" or ours[0] != "unit" or "-" not in ours[2]:  # 2m is a product, not 2 m/s
            return None
    ours, theirs = (each if each[0] == "unit" else ("unit", each, "") for each in (ours, theirs))
    one, other = (measures(each[2]) if each[2] else [] for each in (ours, theirs))
    if not one or not other or one == other:
        return same(ours[1], theirs[1], percent)
    pairs = [(a, b) for what, a in one for another, b in other if what == another]
    return any(trees.equal(times(ours[1], ("n", Numeral(a))), times(theirs[1], ("n", Numeral(b)))) for a, b in pairs)


def _clock(tree: Tree, other: Tree) -> Tree:
    """16:15 is 4:15 pm beside a time that says am or pm."""
    if other[0] != "unit" or other[2].lower() not in ("am", "pm") or tree[:2] != ("f", ":"):
        return tree
    hour, minute = (each[1] if trees.is_whole(each) else -1 for each in tree[2:])
    if 0 < hour < 13 or not (0 <= hour < 24 and 0 <= minute < 60):
        return tree
    return ("unit", ("f", ":", ("n", Numeral((hour - 1) % 12 + 1)), tree[3]), "pm" if hour > 12 else "am")


def measured(tree: Tree) -> Tree:
    """Read a number times letters of units, as in 5 m/s^2 and 72°, as a number and its unit."""
    factors = tree[1:] if tree[0] == "*" else ()
    numbers = [each for each in factors if each[0] == "n"]
    powers = [(each[1:] if each[0] == "^" else (each, ONE)) for each in factors if each not in numbers]
    if len(numbers) != 1 or any(base not in UNIT_SYMBOLS or count[0] != "n" for base, count in powers):
        return tree
    return ("unit", numbers[0], "*".join(f"{base[1]}^{count[1]}" for base, count in powers))


def is_quantity(tree: Tree) -> bool:
    """A numeral, also with a unit or as the last member of a chain."""
    return trees.is_numeral(value_of(measured(value_of(tree))))


def members(tree: Tree) -> list[Tree]:
    """The parts of a list, set, tuple, union or matrix; else the tree alone."""
    if tree[0] in ("u", "matrix"):
        return [each for part in tree[1:] for each in members(part)]
    first = {",": 1, "{}": 1, "row": 1, "()": 3}.get(tree[0])
    return list(tree[first:]) if first else [tree]


def _lists(wanted: Tree, got: Tree, percent: bool) -> bool | None:
    """Compare lists, sets and unions in any order."""
    if _nested(wanted) != _nested(got):
        return False
    ours, theirs = (list(each[1:]) if each[0] in LISTS else [each] for each in (wanted, got))
    chains = ([each for each in parts if each[0] == "="] for parts in (ours, theirs))
    names, others = ({each[2]: each[-1] for each in parts if is_name(each[2])} for parts in chains)
    if len(names) == len(ours) and not any(each[0] == "=" for each in theirs):  # 1, 2 for x = 1, y = 2
        return _in_order(list(names.values()), theirs if len(theirs) > 1 else members(got))
    if wanted[0] == "()" and wanted[1] in ("(", "") and len(others) == len(theirs) > 1:  # x = 1, y = 2 for (1, 2)
        return TO not in nodes(wanted) and _in_order(list(wanted[3:]), [others[name] for name in sorted(others)])
    if {wanted[0], got[0]} == {",", "()"}:  # (3, 5) for 3, 5
        return wanted[0] == "," and wanted[1][0] != "()" and _in_order(members(wanted), members(got))
    for each in ours:
        alike = (k for k, other in enumerate(theirs) if same(each, other, percent))
        place = next((k for k in alike if not _nested(wanted) or (each[0] == "{}") == (theirs[k][0] == "{}")), None)
        if place is None:
            return False
        theirs.pop(place)
    return not theirs


def _nested(tree: Tree) -> bool:
    """Whether a set has sets as members: \\{\\emptyset\\} is not \\emptyset, \\{3\\} is 3."""
    return tree[0] == "{}" and any(each == EMPTY or each[0] == "{}" for each in tree[1:])


def _in_order(ours: list[Tree], theirs: list[Tree]) -> bool:
    return len(ours) == len(theirs) and all(map(same, ours, theirs))


def _ordered(wanted: Tree, got: Tree, percent: bool) -> bool | None:
    """Compare points, intervals, matrices, remainders and relations, part by part; 3:5 and 204_5 as written."""
    wanted, got = _distributed(wanted), _distributed(got)
    kinds = {wanted[0], got[0]}
    if not kinds & {"()", "matrix", "row", "<", "in"}:
        return False if wanted[:2] == got[:2] and wanted[1] in (":", "base") else None
    brackets = wanted[1:3] == got[1:3] or "" in (wanted[1], got[1])  # a column has none
    if len(kinds) > 1 or (len(wanted) == 5 and kinds == {"()"} and not brackets):
        return False
    ours, theirs = ([each for each in tree[1:] if isinstance(each, tuple)] for tree in (wanted, got))
    return _in_order(ours, theirs) and (wanted[0] != "<" or wanted[1] == got[1])


def _distributed(tree: Tree) -> Tree:
    """Multiply the entries of the one matrix or vector of a product by its other factors."""
    inner = [each for each in tree[1:] if tree[0] == "*" and each[0] in ("matrix", "()")]
    if len(inner) != 1:
        return tree
    scale = times(*(each for each in tree[1:] if each != inner[0]))
    return _scaled(inner[0], scale)


def _scaled(tree: Tree, scale: Tree) -> Tree:
    if tree[0] not in ("matrix", "row", "()"):
        return times(scale, tree)
    return (tree[0], *(each if isinstance(each, str) else _scaled(each, scale) for each in tree[1:]))
