"""Reads and compares numbers without algebra: 17, -3.50, 1,234, 2/3, 6 2/3, 4.5e33, 5 million, 40%, 204_5."""

import re
from dataclasses import dataclass
from fractions import Fraction

LONGEST = 4000  # digits of a number that are read
DECIMALS = 6  # number of decimals in which a rounded decimal must agree with a fraction
PLAIN = r"(?:\d+(?:\.\d*)?|\.\d+|[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?)"
NUMBER = re.compile(rf"(?P<sign>[+-]?)\s*(?P<number>{PLAIN})\s*(?P<percent>%?)", re.ASCII)
SCIENTIFIC = re.compile(
    rf"(?P<sign>[+-]?)(?P<number>{PLAIN})\s*(?:[eE]\s*(?P<e>[+-]?\d{{1,3}})|"
    r"\\cdot\s*10\s*\^\s*(?:\{\s*(?P<b>[+-]?\d{1,3})\s*\}|(?P<d>\d)))",
    re.ASCII,
)
POWER = re.compile(r"(?P<sign>[+-]?)10\s*\^\s*(?:\{\s*(?P<b>[+-]?\d{1,3})\s*\}|(?P<d>\d))", re.ASCII)
FRACTION = re.compile(
    r"(?P<sign>[+-]?)\s*(?:(?P<whole>\d+)\s*)?\\frac\{\s*(?P<minus>-?)(?P<upper>\d+)\s*\}"
    r"\{\s*(?P<lower>\d+)\s*\}\s*(?P<percent>%?)",
    re.ASCII,
)
SLASHED = re.compile(
    r"(?P<sign>[+-]?)\s*(?:(?P<whole>\d+)\s+)?(?P<minus>)(?P<upper>\d+)\s*/\s*(?P<lower>\d+)\s*(?P<percent>%?)",
    re.ASCII,
)
REPEATING = re.compile(
    r"(?P<sign>[+-]?)(?P<whole>\d*)\.(?P<fixed>\d*)\\(?:overline|bar)\s*\{(?P<again>\d+)\}", re.ASCII
)
NEGATIVE = re.compile(r"\\frac\{\s*(\d+)\s*\}\{\s*-\s*(\d+)\s*\}", re.ASCII)
MULTIPLIERS = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
LARGE = re.compile(rf"(?P<number>[+-]?{PLAIN})\s*(?:\\text\{{\s*)?(?P<word>{'|'.join(MULTIPLIERS)})\s*\}}?", re.ASCII)
BASED = re.compile(
    r"(?P<digits>-?[0-9A-Za-z]*\d[0-9A-Za-z]*(?:\.[0-9]+)?)\s*_\s*(?:\{\s*(?P<b>\d+)\s*\}|(?P<d>\d+))", re.ASCII
)
ONES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
ONES += [f"{each}teen" for each in ("thir", "four", "fif", "six", "seven", "eigh", "nine")]
TENS = [f"{each}ty" for each in ("twen", "thir", "for", "fif", "six", "seven", "eigh", "nine")]
NAMED = {name: value for value, name in enumerate(ONES)} | {
    f"{ten}-{one}" if value else ten: 10 * tens + value
    for tens, ten in enumerate(TENS, start=2)
    for value, one in enumerate(ONES[:10])
}
WORD = re.compile(r"(?:\\text\{\s*)?([A-Za-z]+(?:[- ][A-Za-z]+)?)\s*\}?")


@dataclass(frozen=True)
class Number:
    value: Fraction
    places: int | None = None  # number of written decimals; None if the number is exact
    percent: bool = False


def number(text: str) -> Number | None:
    """Read a number; None if the text is not one. The `value` of 40% is 2/5."""
    text = _unwrapped(text.strip())
    if len(text) > LONGEST:
        return None
    if (found := WORD.fullmatch(text)) and (named := NAMED.get(found[1].lower().replace(" ", "-"))) is not None:
        return Number(Fraction(named))
    if found := NUMBER.fullmatch(text):
        digits = found["number"].replace(",", "")
        return _number(found, Fraction(digits), _places(digits))
    if found := SCIENTIFIC.fullmatch(text):
        digits, power = found["number"].replace(",", ""), int(found["e"] or found["b"] or found["d"])
        return Number(_signed(found, Fraction(digits) * Fraction(10) ** power), max(_places(digits) or 0, 0) or None)
    if found := POWER.fullmatch(text):
        return Number(_signed(found, Fraction(10) ** int(found["b"] or found["d"])))
    if found := LARGE.fullmatch(text):
        return Number(Fraction(found["number"].replace(",", "")) * MULTIPLIERS[found["word"]])
    if found := REPEATING.fullmatch(text):  # 0.1\overline{6} is 16/90 - 1/90
        whole, fixed, again = found["whole"], found["fixed"], found["again"]
        nines = 10 ** len(fixed) * (10 ** len(again) - 1)
        return Number(_signed(found, Fraction(int(whole + fixed + again) - int(whole + fixed or 0), nines)))
    text = NEGATIVE.sub(r"-\\frac{\1}{\2}", text)
    if found := FRACTION.fullmatch(text) or SLASHED.fullmatch(text):
        if int(found["lower"]) == 0 or (found["whole"] and found["minus"]):
            return None
        part = Fraction(int(found["upper"]), int(found["lower"]))
        return _number(found, int(found["whole"] or 0) + (-part if found["minus"] else part), None)
    return None


def based(text: str) -> tuple[str, int] | None:
    """Split 204_5 into its digits and base: ("204", 5)."""
    found = BASED.fullmatch(text.strip())
    return (found["digits"].upper(), int(found["b"] or found["d"])) if found else None


def same_number(a: Number, b: Number) -> bool:
    """Compare two numbers: exactly, or to six decimals if one is a decimal; below 0.001 to three digits."""
    if a.value == b.value:
        return True
    if a.places is None and b.places is None:
        return False
    largest = max(abs(a.value), abs(b.value))
    if largest < Fraction(1, 1000):
        return abs(a.value - b.value) <= largest / 1000
    return round(a.value, DECIMALS) == round(b.value, DECIMALS)


def rounds_to(exact: Fraction, written: Number) -> bool:
    """Return whether `written` is `exact` rounded to its number of decimals."""
    return abs(exact - written.value) <= Fraction(501, 1000) / 10 ** (written.places or 0)


def _number(found: re.Match, value: Fraction, places: int | None) -> Number:
    percent = bool(found["percent"])
    value = _signed(found, value) / (100 if percent else 1)
    return Number(value, places + 2 * percent if places is not None else None, percent)


def _signed(found: re.Match, value: Fraction) -> Fraction:
    return -value if found["sign"] == "-" else value


def _places(digits: str) -> int | None:
    return len(digits.partition(".")[2]) if "." in digits else None


def _unwrapped(text: str) -> str:
    """Remove braces and parentheses around the whole text."""
    while len(text) > 1 and text[0] + text[-1] in ("{}", "()") and not re.search(r"[(){}]", text[1:-1]):
        text = text[1:-1].strip()
    return text
