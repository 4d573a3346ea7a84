"""Decides with sympy whether two formulas are equal, by their values to 30 digits at chosen points.

`simplify` is not used, because it takes seconds and values take milliseconds. Analytic formulas that agree at such
points are equal.
"""

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy

from megatron_rft.rewards.equivalence.rationals import Number, number

CONFIG = ConversionConfig(interpret_as_mixed_fractions=False, lowercase_symbols=False)
DIGITS = 30
EXACT = sympy.Float("1e-18", DIGITS)  # relative
ROUNDED = sympy.Float("1e-6", DIGITS)  # absolute; below 0.001 the numbers must agree in three digits
DECIMAL = re.compile(r"(\d*)\.(\d+)", re.ASCII)
DIFFERENTIAL = re.compile(r"\\int|\\frac\{d(?:\^\{?\d\}?)?[a-z]?\}\{d")
D = re.compile(r"\\[a-zA-Z]+|d(?=[a-zA-Z])")  # de is d times e
FACTORIAL = re.compile(r"(\d{1,4000})\s*!", re.ASCII)
ARGUMENT = r"\{((?:[^{}]|\{[^{}]*\})*)\}"
BINOMIAL = re.compile(rf"\\[dt]?binom\s*{ARGUMENT}\s*{ARGUMENT}")
LARGEST_FACTORIAL, LARGEST_CHOICE = 300_000, 100_000  # computed in less than a second
# Values for symbols, by their order. Irrational, so that no two formulas agree by accident; some are negative.
POINTS = [
    ["1.6180339887498948482", "2.7320508075688772935", "0.5772156649015328606", "3.3166247903553998491"],
    ["2.2360679774997896964", "0.8346268416740731862", "1.2020569031595942853", "0.2614972128476427837"],
    ["-0.7390851332151606416", "1.3247179572447460259", "-2.5029078750958928222", "1.4513692348833810502"],
    ["4.6692016091029906718", "-1.7548776662466927600", "2.6220575542921198104", "-3.2758229187218111597"],
]
NAMES = {"i": sympy.I, "e": sympy.E}
NO_VALUE = (ArithmeticError, ValueError, TypeError, AttributeError, RecursionError)


class Unreadable(ValueError):
    """The text is not a formula."""


def read(text: str) -> Any:
    """Parse a text to a sympy expression. Raises Unreadable."""
    try:
        found = latex2sympy(_as_fractions(text), conversion_config=CONFIG)
    except Exception as error:  # sympy's parser, antlr and sympy raise many kinds
        raise Unreadable(f"{type(error).__name__}: {text[:80]}") from None
    if not isinstance(found, sympy.Expr):
        raise Unreadable(f"a {type(found).__name__}: {text[:80]}")
    constants = {symbol: NAMES[symbol.name] for symbol in found.free_symbols if symbol.name in NAMES}
    return found.subs(constants) if constants else found


def equal(reference: str, answer: str) -> bool:
    """Return whether two formulas are equal. Raises Unreadable if the reference is not a formula."""
    wanted = read(reference)
    if any(each not in reference for each in endless(answer)):
        return False
    try:
        got = read(answer)
    except Unreadable:
        return False
    close = _nearly if DECIMAL.search(reference) or (DECIMAL.search(answer) and not _irrational(wanted)) else _exactly
    return _agree(wanted, got, close)


def endless(text: str) -> list[str]:
    """Return the parts of a formula that would hold the grader until its time limit: 1000000!."""
    factorials = [found[0] for found in FACTORIAL.finditer(text) if int(found[1]) > LARGEST_FACTORIAL]
    binomials = [found[0] for found in BINOMIAL.finditer(text) if _is_wide(number(found[1]), number(found[2]))]
    return factorials + binomials


def _is_wide(among: Number | None, chosen: Number | None) -> bool:
    return bool(among and chosen) and min(chosen.value, among.value - chosen.value) > LARGEST_CHOICE


def proportional(reference: tuple[str, str], answer: tuple[str, str]) -> bool:
    """Return whether two equations (left, right) are equivalent: their differences are multiples of each other."""
    try:
        first, second = (read(left) - read(right) for left, right in (reference, answer))
    except Unreadable:
        return False
    if first.free_symbols != second.free_symbols or not first.free_symbols:
        return False
    ratios = [ratio for ratio in _values(first / second, _points(first)) if ratio is not None]
    return len(ratios) > 1 and ratios[0] != 0 and all(_exactly(ratio, ratios[0]) for ratio in ratios)


def value(text: str) -> Fraction | None:
    """Return the value of a formula without symbols to 30 digits; None if it has no value or is not real."""
    try:
        (found,) = _values(read(text), [{}])
    except Unreadable:
        return None
    return Fraction(str(sympy.re(found))) if found is not None and sympy.im(found) == 0 else None


def _as_fractions(text: str) -> str:
    """Replace decimals and degrees by exact values: 2.5 -> 25/10."""
    if not DIFFERENTIAL.search(text):
        text = D.sub(lambda m: "{d}" if m[0] == "d" else m[0], text)
    text = DECIMAL.sub(lambda m: rf"\frac{{{int(m[1] + m[2])}}}{{{10 ** len(m[2])}}}", text)
    return text.replace("°", r"\cdot \frac{\pi}{180}")


def _irrational(wanted: Any) -> bool:
    """Compare a decimal answer. It may be a rounding of a fraction, but an irrational number must be given exactly."""
    powers = any(power.exp.is_integer is False for power in wanted.atoms(sympy.Pow))
    return powers or bool(wanted.atoms(sympy.NumberSymbol, sympy.Function))


def _agree(wanted: Any, got: Any, close: Callable) -> bool:
    if wanted == got:
        return True
    points = _points(wanted + got)
    pairs = zip(_values(wanted, points), _values(got, points), strict=True)
    defined = [(a, b) for a, b in pairs if a is not None or b is not None]
    return bool(defined) and all(a is not None and b is not None and close(a, b) for a, b in defined)


def _points(formula: Any) -> list[dict]:
    symbols = sorted(formula.free_symbols, key=lambda symbol: symbol.name)
    if not symbols:
        return [{}]
    return [
        {symbol: sympy.Float(row[k % len(row)], DIGITS) + k // len(row) for k, symbol in enumerate(symbols)}
        for row in POINTS
    ]


def _values(formula: Any, points: list[dict]) -> list:
    """Return the formula's value at each point, or None. Integrals and sums are evaluated once."""
    try:
        formula = formula.doit()
    except NO_VALUE:
        return [None] * len(points)
    return [_value(formula, point) for point in points]


def _value(formula: Any, point: dict) -> Any:
    try:
        exact = formula.subs(point).doit()
        found = exact if exact.is_Rational else exact.evalf(DIGITS)
    except NO_VALUE:
        return None
    if found in (sympy.oo, -sympy.oo):
        return found
    return found if found.is_number and found.is_finite else None


def _exactly(a: Any, b: Any) -> bool:
    if a in (sympy.oo, -sympy.oo) or b in (sympy.oo, -sympy.oo) or (a.is_Rational and b.is_Rational):
        return a == b
    return bool(abs(a - b) <= EXACT * max(1, abs(a), abs(b)))


def _nearly(a: Any, b: Any) -> bool:
    if a in (sympy.oo, -sympy.oo) or b in (sympy.oo, -sympy.oo):
        return a == b
    return bool(abs(a - b) <= min(ROUNDED, max(abs(a), abs(b)) / 1000))
