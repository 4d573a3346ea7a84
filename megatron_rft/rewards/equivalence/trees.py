r"""Canonical trees of formulas: spellings of one formula have one tree, and a formula that differs by work has another.

    ("n", Numeral) ("s", name) ("+", ...) ("*", ...) ("^", base, exponent) ("f", name, ...)
    ("text", words) ("unit", tree, unit) ("=", signs, ...) a chain, (",", ...) a list, ("{}", ...) a set,
    ("()", "(", "]", ...) a tuple or an interval, ("u", ...) a union of intervals, ("matrix", ...) of ("row", ...)

5.0 is 5; brackets, unary plus, + 0, * 1, ^1 and the order of sums and products are gone; a - b is a + (-1)b, a / b is
a b^-1, roots are powers. Nothing is computed.

Their values are exact where they are rational, else of 40 digits, at chosen points. Analytic formulas that agree there
are equal. What has no value (an integral, a limit) is equal only to its own tree. A verdict has LIMIT_S.
"""

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from itertools import chain
from typing import Any

import mpmath

Tree = tuple
mp = mpmath.MPContext()
mp.dps = 40
number = mp.mpmathify
EXACT = mp.mpf("1e-18")  # relative
ROUNDED = Fraction(1, 10**6)  # absolute; below 0.001 the numbers must agree in three digits
LARGEST = 20_000  # bits of a rational number; beyond, values have 40 digits
ENDLESS = 10**9  # numbers beyond e^ENDLESS have no value
# Values for symbols, by their order: irrational, so that no two formulas agree by accident, and some negative.
POINTS = [
    ["1.6180339887498948482", "2.7320508075688772935", "0.5772156649015328606", "3.3166247903553998491"],
    ["2.2360679774997896964", "0.8346268416740731862", "1.2020569031595942853", "0.2614972128476427837"],
    ["-0.7390851332151606416", "1.3247179572447460259", "-2.5029078750958928222", "1.4513692348833810502"],
    ["4.6692016091029906718", "-1.7548776662466927600", "2.6220575542921198104", "-3.2758229187218111597"],
    ["52.360679774997896964", "97.164078649987381733", "-61.803398874989484820", "38.196601125010515180"],  # for floors
]
CONSTANTS = {"e": mp.e, "i": mp.mpc(0, 1), r"\pi": mp.pi, r"\infty": mp.inf, "°": mp.pi / 180}
NO_VALUE = (ArithmeticError, ValueError, TypeError, AttributeError, RecursionError, KeyError, mp.NoConvergence)
LIMITED = {"sin", "cos", "tan", "cot", "sec", "csc", "exp", "sinh", "cosh", "tanh"}
FUNCTIONS = {
    "ln": mp.log, "lg": mp.log10, "arcsin": mp.asin, "arccos": mp.acos, "arctan": mp.atan, "arccot": mp.acot,
    "abs": abs, "lfloor": mp.floor, "lceil": mp.ceil, "max": max, "min": min, "Re": mp.re, "Im": mp.im, "arg": mp.arg,
    "inverse": lambda x: 1 / x, ":": lambda a, b: a / b, **{name: getattr(mp, name) for name in LIMITED},
}  # fmt: skip
LIMIT_S = 2.0  # of a verdict, in CPU time of its thread
verdict = threading.local()


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


@contextmanager
def time_limit(share: float = 1) -> Iterator[None]:
    """Within it, reading and evaluating raise TimeoutError after a share of LIMIT_S, or when an outer limit ends."""
    before = getattr(verdict, "end", math.inf)
    verdict.end = min(before, time.thread_time() + share * LIMIT_S)
    try:
        yield
    finally:
        verdict.end = before


def within_limit() -> None:
    if time.thread_time() > getattr(verdict, "end", math.inf):
        raise TimeoutError(f"no verdict within its share of {LIMIT_S} s")


def symbols(tree: Tree) -> set[str]:
    return {each[1] for each in nodes(tree) if each[0] == "s"} - CONSTANTS.keys()


def value(tree: Tree, point: dict[str, Any] | None = None) -> Any:
    """Return a Fraction, or a real or complex number of mpmath; None if the formula has no value, or a huge one."""
    try:
        found = _value(tree, point or {})
    except NO_VALUE:
        return None
    return None if found != found else found


def values(tree: Tree, names: Iterable[str]) -> Iterator[Any]:
    """The values of a formula at each of the points, or its one value, computed when they are read."""
    points = [{name: mp.mpf(row[k % 4]) + k // 4 for k, name in enumerate(sorted(names))} for row in POINTS]
    return (value(tree, point) for point in (points if names else [{}]))


def equal(wanted: Tree, got: Tree) -> bool:
    """Whether two formulas have the same values. A decimal may be a rounding, but not of an irrational number."""
    decimals = [any(each[0] == "n" and each[1].places for each in nodes(tree)) for tree in (wanted, got)]
    names = symbols(wanted) | symbols(got)
    pairs = (pair for pair in zip(values(wanted, names), values(got, names), strict=True) if pair != (None, None))
    if (first := next(pairs, None)) is None:
        return False
    rounded = decimals[0] or (decimals[1] and isinstance(first[0], Fraction))
    return all(None not in pair and close(*pair, rounded=rounded) for pair in chain([first], pairs))


def proportional(reference: tuple[Tree, Tree], answer: tuple[Tree, Tree]) -> bool:
    """Whether two equations (left, right) are equivalent: their differences are multiples of each other."""
    names = set.union(*map(symbols, reference))
    if names != set.union(*map(symbols, answer)):
        return False
    sides = [values(plus(left, times(MINUS, right)), names) for left, right in (reference, answer)]
    ratios = [number(b) / number(a) for a, b in zip(*sides, strict=True) if None not in (a, b) and a != 0]
    return len(ratios) > 1 and ratios[0] != 0 and all(close(ratio, ratios[0]) for ratio in ratios)


def close(a: Any, b: Any, *, rounded: bool = False) -> bool:
    if a == b or mp.inf in (abs(a), abs(b)) or (not rounded and isinstance(a, Fraction) and isinstance(b, Fraction)):
        return bool(a == b)
    a, b = number(a), number(b)
    largest = max(abs(a), abs(b))
    return abs(a - b) <= (min(number(ROUNDED), largest / 1000) if rounded else EXACT * max(1, largest))


def is_whole(tree: Tree) -> bool:
    return tree[0] == "n" and tree[1].denominator == 1


def is_number(tree: Tree) -> bool:
    """17, -3.5, 2/3, 6 2/3, 3 * 10^8, with or without degrees."""
    parts = [each for each in tree[1:] if each != MINUS] if tree[0] == "*" else [tree]
    factors = [each for each in parts if each != DEGREE]
    scales = [each for each in factors if each[0] != "n"]
    powers = all(each[0] == "^" and each[1][0] == each[2][0] == "n" for each in scales)
    plain = powers and all(each[2] == MINUS or each[1][1] == 10 for each in scales)
    return bool(factors) and len(factors) - len(scales) < 2 and len(scales) < 2 and plain


def is_numeral(tree: Tree) -> bool:
    """A number; 2^10, (1/2)^3, 5!, C(5, 2), also plus or minus 1."""
    if tree[0] in ("+", "*") and len(tree) == 3 and {ONE, MINUS} & set(tree):
        inner = next((each for each in tree[1:] if each not in (ONE, MINUS)), ONE)
        return is_numeral(inner) and (tree[0] == "*" or (inner[0] in ("^", "f") and ratio(inner) is None))
    if tree[0] == "^" and is_whole(tree[2]) and (tree[1][0] == "n" or ratio(tree[1])):
        return True
    if tree[0] == "f" and tree[1] in ("!", "binom", "inverse"):
        return all(is_whole(each) or (tree[1] == "inverse" and each[0] == "n") for each in tree[2:])
    return is_number(tree)


def _value(tree: Tree, point: dict[str, Any]) -> Any:
    within_limit()
    kind = tree[0]
    if kind == "n":
        return Fraction(tree[1])
    if kind == "s":
        return CONSTANTS[tree[1]] if tree[1] in CONSTANTS else point[tree[1]]
    if kind in "+*":
        found: Any = Fraction(kind == "*")
        for each in tree[1:]:
            part = _value(each, point)
            if not (_bits(found) + _bits(part) < LARGEST):
                found, part = number(found), number(part)
            found = found + part if kind == "+" else found * part
        return found
    if kind == "^":
        return _power(_value(tree[1], point), _value(tree[2], point))
    if kind == "f":
        return _function(tree[1], tree[2:], point)
    raise ValueError(kind)


def _function(name: str, members: tuple, point: dict[str, Any]) -> Any:
    scripts = {each[0]: each[1] for each in members if isinstance(each, tuple) and each[0] in ("low", "up")}
    given = [_value(each, point) for each in members if each[0] not in ("low", "up")]
    if name == "log":
        return mp.log(number(given[0])) / (mp.log(number(_value(scripts["low"], point))) if "low" in scripts else 1)
    if name in ("!", "binom", "gcd", "lcm"):
        return _integers(name, given)
    if name in LIMITED and abs(given[0]) > ENDLESS:
        raise ValueError("an argument that is too large")
    return FUNCTIONS[name](*(given if name in (":", "abs", "max", "min") else map(number, given)))


def _bits(number: Any) -> float:
    """The size of a rational number; infinite for others."""
    if isinstance(number, Fraction):
        return max(number.numerator.bit_length(), number.denominator.bit_length())
    return math.inf


def _power(base: Any, exponent: Any) -> Any:
    if base == 0 and not (exponent == exponent.real > 0):
        raise ValueError("0 to a power that is not positive")
    if isinstance(exponent, Fraction) and exponent.denominator == 1 and abs(exponent) < 2**60:
        exponent = int(exponent)
        if abs(exponent) * _bits(base) < LARGEST:
            return base**exponent
    base, exponent = number(base), exponent if isinstance(exponent, int) else number(exponent)
    if base and abs(exponent) * (abs(mp.log(abs(base))) + 4) > ENDLESS:
        raise ValueError("a number that is too large")
    return base**exponent


def _integers(name: str, given: list[Any]) -> Any:
    if all(isinstance(each, Fraction) and each.denominator == 1 for each in given):
        whole = [int(each) for each in given]
        if name in ("gcd", "lcm") or (min(whole) >= 0 and max(whole) < 300):
            return Fraction(getattr(math, {"!": "factorial", "binom": "comb"}.get(name, name))(*whole))
    if any(abs(each) > 10**12 for each in given) or name in ("gcd", "lcm"):
        raise ValueError("an argument that is too large")
    return mp.factorial(number(given[0])) if name == "!" else mp.binomial(*map(number, given))
