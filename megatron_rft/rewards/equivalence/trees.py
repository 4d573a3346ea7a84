r"""Canonical trees of formulas: spellings of one formula have one tree, and a formula that differs by work has another.

    ("n", Numeral) ("s", name) ("+", ...) ("*", ...) ("^", base, exponent) ("f", name, ...)
    ("text", words) ("unit", tree, unit) ("=", signs, ...) a chain, (",", ...) a list, ("{}", ...) a set,
    ("()", "(", "]", ...) a tuple or an interval, ("u", ...) a union of intervals, ("matrix", ...) of ("row", ...)

5.0 is 5; brackets, unary plus, + 0, * 1, ^1 and the order of sums and products are gone; a - b is a + (-1)b, a / b is
a b^-1, roots are powers. Nothing is computed.
"""

from collections.abc import Callable, Iterator
from fractions import Fraction

Tree = tuple


class Numeral(Fraction):
    """A number as written, equal to any other of its value. `places`: written decimals; None if it is exact."""

    def __new__(cls, value=0, below=None, *, places: int | None = None, percent: bool = False):
        made = super().__new__(cls, value, below)
        made.places, made.percent = places, percent
        return made

    def __neg__(self):
        return Numeral(super().__neg__(), places=self.places, percent=self.percent)


ZERO, ONE, MINUS = (("n", Numeral(value)) for value in (0, 1, -1))
DEGREE = ("s", "°")


def nodes(tree: Tree) -> Iterator[Tree]:
    yield tree
    for each in tree[1:]:
        if isinstance(each, tuple):
            yield from nodes(each)


def plus(*terms: Tree) -> Tree:
    flat = [each for term in terms for each in (term[1:] if term[0] == "+" else (term,))]
    flat = sorted((each for each in flat if each != ZERO), key=repr)
    return ZERO if not flat else flat[0] if len(flat) == 1 else ("+", *flat)


def times(*factors: Tree) -> Tree:
    flat = [each for factor in factors for each in (factor[1:] if factor[0] == "*" else (factor,))]
    negative = sum(each[0] == "n" and each[1] < 0 for each in flat) % 2
    flat = [("n", -each[1]) if each[0] == "n" and each[1] < 0 else each for each in flat]
    kept = sorted((each for each in flat if each != ONE), key=repr)
    if negative:
        place = next((k for k, each in enumerate(kept) if each[0] == "n"), None)
        kept[place or 0 : 0 if place is None else place + 1] = [MINUS if place is None else ("n", -kept[place][1])]
    return (flat[0] if flat else ONE) if not kept else kept[0] if len(kept) == 1 else ("*", *kept)


def power(base: Tree, exponent: Tree) -> Tree:
    if exponent == MINUS and base[0] == "^" and base[2][0] == "n":
        return power(base[1], ("n", -base[2][1]))
    if quotient := ratio(exponent):
        exponent = ("n", Numeral(quotient))
    return base if exponent == ONE or base == ONE else ("^", base, exponent)


def ratio(tree: Tree) -> Fraction | None:
    """Return the value of 2/3, 1/3 or -1/3: a number times the inverse of a number, or that inverse."""
    inverse, upper = sorted(tree[1:], key=repr) if tree[0] == "*" and len(tree) == 3 else (tree, ONE)
    if upper[0] == "n" and inverse[0] == "^" and inverse[2] == MINUS and inverse[1][0] == "n" and inverse[1][1]:
        return Fraction(upper[1]) / inverse[1][1]
    return None


def rebuilt(tree: Tree, change: Callable[[Tree], Tree]) -> Tree:
    """Return the tree with its members changed."""
    members = [change(each) if isinstance(each, tuple) else each for each in tree[1:]]
    return {"+": plus, "*": times, "^": power}[tree[0]](*members) if tree[0] in "+*^" else (tree[0], *members)


def value_of(tree: Tree) -> Tree:
    """The last member of a chain, without its unit."""
    tree = tree[-1] if tree[0] == "=" else tree
    return tree[1] if tree[0] == "unit" else tree
