"""Words of answers: numbers and ordinals, dates, "Yes, it is", and units of measure: what they measure, and how large
they are. Other words after a number are not compared.
"""

import re
from collections import defaultdict
from fractions import Fraction

LARGE = {"dozen": 12, "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
ONES = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
TENS = "eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety"
NUMBERS = dict(zip(f"{ONES} {TENS}".split(), [*range(20), *range(20, 100, 10)], strict=True))
ORDINALS = {re.sub("y$", "ie", name) + "th": name for name in NUMBERS | LARGE} | {
    "first": "one", "second": "two", "third": "three", "fifth": "five", "eighth": "eight", "ninth": "nine",
    "twelfth": "twelve",
}  # fmt: skip
SHARES = ORDINALS | {"half": "two", "halve": "two", "quarter": "four"}
KINDS = {"hundred": "h", "and": "a"} | dict.fromkeys(("dozen", "thousand", "million", "billion", "trillion"), "k")
BELOW_1000 = "(?:o?ha?)?(?:to?|o|n)?"  # letters of KINDS: ones, tens, numbers from ten to nineteen
SPELLED = re.compile(f"(?=.)(?:{BELOW_1000}ka?)*{BELOW_1000}")
MONTHS = "january february march april may june july august september october november december"
MONTH = "|".join(f"{name[:3]}(?:{name[3:]})?" for name in MONTHS.split()).replace("sep(", "sept?(")
DAY = r"(\d{1,2})(?:\s*(?:st|nd|rd|th))?"
DATES = [rf"(?P<month>{MONTH})\.? {DAY}(?:,? (\d{{4}}))?", rf"{DAY}(?: of)? (?P<month>{MONTH})\.?(?:,? (\d{{4}}))?"]
ORDINAL = re.compile(r"(\d+) ?(?:st|nd|rd|th)")
VERB = "is|are|was|were|does|do|did|can|could|will|would|has|have|had"
CONFIRMED = re.compile(rf"(yes|no)[,.;]? (?:it|they|there|this|that|he|she|we|you|i) (?:{VERB}|ca)( ?not|n't)?")
WRAPPED = re.compile(r"\\[a-z]+\s*\{|\\[a-z]+(?=\s)|\\.|[{}^$\s]")
# What every text has that `spoken` changes.
MAYBE = re.compile(rf"(?i)\b(?:yes|no|and|{MONTH})\b|\d\W*(?:(?:text|math)\w*\W*)?(?:st|nd|rd|th)\b")
LONGEST = 80
# Units of one kind in a row, each with its other names and its size in the first one's.
TABLE = (
    "m meter metre 1 | cm centimeter centimetre 1/100 | mm millimeter millimetre 1/1000 | nm 1/1000000000 | "
    "km kilometer kilometre 1000 | in inch inche 127/5000 | ft foot feet 381/1250 | yd yard 1143/1250 | "
    "mi mile 201168/125; s sec second 1 | ms 1/1000 | min minute 60 | h hr hour 3600 | day 86400 | week 604800 | "
    "month 2628000 | yr year 31536000; kg kilogram 1 | g gram 1/1000 | mg milligram 1/1000000 | "
    "lb pound 45359237/100000000 | oz ounce 45359237/1600000000 | ton 1000; "
    "l liter litre 1 | ml milliliter 1/1000 | "
    "gallon 473176473/125000000 | quart 473176473/500000000; dollar usd 1 | cent 1/100; n newton 1; "
    "w watt 1 | kw 1000 | hp 746; j joule 1 | kj 1000 | kwh 3600000; ev 1 | kev 1000 | mev 1000000 | gev 1000000000; "
    "rad radian 1 | ° 3141592653589793/180000000000000000; hz hertz 1 | khz 1000 | mhz 1000000; "
    "pa pascal 1 | kpa 1000; byte 1 | "
    "kb 1000 | mb 1000000 | gb 1000000000; a amp ampere 1; mol mole 1; c coulomb 1; v volt 1; k kelvin 1; "
    "°c celsius 1; °f fahrenheit 1; rpm 1; ly 1; am 1; pm 1; sterling pound £ 1; euro eur 1; yen jpy ¥ 1; "
    "yuan rmb cny ¥ 1; rupee 1"
)
UNITS: dict[str, list[tuple[str, Fraction]]] = defaultdict(list)  # a pound is a weight and a currency
for row in TABLE.split(";"):
    for *names, size in map(str.split, row.split("|")):
        for name in names:
            UNITS[name].append((row.split()[0], Fraction(size)))
COMPOUND = {"mph": "mi/h", "kph": "km/h", "kmh": "km/h", "mps": "m/s"}
# Words behind a number that are not its unit.
NO_UNIT = (
    "or and not maybe perhaps possibly either else but if mod base plus minus over less more than is are was by "
    "of from to hundred thousand million billion trillion pi sqrt sin cos tan log ln th st nd rd unless"
)
WORD = re.compile(r"[a-zA-Z°£¥]+")
POWERS = {"square": 2, "sq": 2, "cubic": 3}
PART = re.compile(
    r"(?P<per>/|per\b)?\s*(?:(?P<more>square|sq|cubic)\b)?\s*(?P<name>[a-zA-Z°£¥]+)(?:\s*\^\s*\{?\s*(?P<power>-?\d))?"
)
LETTERS = set("mgshLNJWVAKCFl")


def spoken(text: str) -> str:
    """Write an ordinal, a date, and "Yes, it is" in one way; any other text stays as it is."""
    if len(text) > LONGEST:
        return text
    said = " ".join(WRAPPED.sub(" ", text.lower()).split()).removeprefix("the ").rstrip(" .")
    if found := ORDINAL.fullmatch(said):
        return rf"\text{{number {found[1]}}}"
    if (found := CONFIRMED.fullmatch(said)) and (found[1] == "no") == bool(found[2]):
        return rf"\text{{{found[1]}}}"
    if is_number(said):
        return rf"\text{{{said}}}"
    found = next(filter(None, (re.fullmatch(each, said) for each in DATES)), None)
    others = [each.lstrip("0") for each in found.groups() if each and each.isdecimal()] if found else []
    return rf"\text{{{found['month'][:3]} {' '.join(others)}}}" if found else text


def _kind(word: str) -> str:
    value = NUMBERS.get(word)
    return KINDS.get(word, "?" if value is None else "o" if value < 10 else "n" if value < 20 else "t")


def is_number(text: str) -> bool:
    words = re.findall("[a-z]+", text.lower())
    return SPELLED.fullmatch("".join(map(_kind, words))) is not None


def number(words: list[str]) -> Fraction | str | None:
    """Return the number that words spell, "number 21" for "twenty first", 2/3 for "two thirds"; None for others."""
    *before, last = words
    below, some = SHARES.get(last.removesuffix("s")), before or ["one"]
    if below and is_number(" ".join(some)) and (last[-1] == "s" or last in ("half", "quarter") or before == ["one"]):
        return Fraction(_count(some), _count([below]))
    whole = [*before, ORDINALS.get(last, last)]
    if not is_number(" ".join(whole)):
        return None
    return f"number {_count(whole)}" if last in ORDINALS else Fraction(_count(whole))


def _count(words: list[str]) -> int:
    total, group = 0, 0
    for word in words:
        if word in LARGE and word != "hundred":
            total, group = total + max(group, 1) * LARGE[word], 0
        else:
            group = max(group, 1) * 100 if word == "hundred" else group + NUMBERS.get(word, 0)
    return total + group


def is_unit(said: str, apart: bool, quoted: bool) -> bool:
    """Whether words behind a value are a unit, as cm, apples and \\text{...}, or a product of symbols, as mv and 2m."""
    words = WORD.findall(said)
    if not words or len(words) > 5 or {word.lower() for word in words} & set(NO_UNIT.split()):
        return False
    if "times" in words:
        return said == "times"
    letters = {word for word in words if len(word) == 1}
    if quoted or letters:
        return quoted or ("/" in said and letters <= LETTERS)
    known = UNITS.keys() | COMPOUND.keys()
    return all(_name(word) in known or (len(word) >= 4 - apart and re.search("[aeiou]", word)) for word in words)


def _name(word: str) -> str:
    word = word.lower()
    return word if word in UNITS else word.removesuffix("s")


def measures(unit: str) -> list[tuple[dict[str, int], Fraction]]:
    """Return what a unit measures, with powers, and its size: m/s^2; nothing if a word of it is no unit of measure."""
    found, sign = [({}, Fraction(1))], 1
    for part in PART.finditer(COMPOUND.get(unit.lower(), unit)):
        sign = -1 if part["per"] else sign
        power = sign * int(part["power"] or POWERS.get(part["more"], 1))
        found = [
            (dimension | {what: dimension.get(what, 0) + power}, size * one**power)
            for dimension, size in found
            for what, one in UNITS.get(_name(part["name"]), ())
        ]
    return found
