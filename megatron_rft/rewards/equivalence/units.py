"""Units of measure: what they measure, and how large they are. Other words after a number are not compared."""

import re
from collections import Counter
from fractions import Fraction

# What a unit measures: its names, each group with its size in the first one's.
TABLE = {
    "length": "m meter metre 1 | cm centimeter centimetre 1/100 | mm millimeter millimetre 1/1000 | nm 1/1000000000 | "
    "km kilometer kilometre 1000 | in inch inche 127/5000 | ft foot feet 381/1250 | yd yard 1143/1250 | "
    "mi mile 201168/125",
    "time": "s sec second 1 | ms 1/1000 | min minute 60 | h hr hour 3600 | day 86400 | week 604800 | "
    "month 2628000 | yr year 31536000",
    "mass": "kg kilogram 1 | g gram 1/1000 | mg milligram 1/1000000 | lb 45359237/100000000 | "
    "oz ounce 45359237/1600000000 | ton 1000",
    "volume": "l liter litre 1 | ml milliliter 1/1000 | gallon 3785411784/1000000000 | quart 946352946/1000000000",
    "money": "dollar 1 | cent 1/100", "pounds": "pound 1", "euros": "euro 1", "yen": "yen 1",
    "force": "n newton 1", "power": "w watt 1 | kw 1000 | hp 746", "energy": "j joule 1 | kj 1000 | kwh 3600000",
    "electron volts": "ev 1 | kev 1000 | mev 1000000 | gev 1000000000", "current": "a amp ampere 1",
    "angle": "rad radian 1 | ° 3141592653589793/180000000000000000", "amount": "mol mole 1", "charge": "c coulomb 1",
    "morning": "am 1", "evening": "pm 1", "kelvin": "k kelvin 1", "celsius": "°c 1", "fahrenheit": "°f 1",
    "voltage": "v volt 1", "frequency": "hz hertz 1 | khz 1000 | mhz 1000000", "pressure": "pa pascal 1 | kpa 1000",
    "turns": "rpm 1", "light years": "ly 1", "data": "byte 1 | kb 1000 | mb 1000000 | gb 1000000000",
}  # fmt: skip
UNITS = {
    name: (what, Fraction(names.split()[-1]))
    for what, row in TABLE.items()
    for names in row.split("|")
    for name in names.split()[:-1]
}
COMPOUND = {"mph": "mi/h", "kph": "km/h", "kmh": "km/h", "mps": "m/s"}
# Words behind a number that are not its unit.
OTHER_WORDS = (
    "or and not maybe perhaps possibly either else but if mod base plus minus times over less more than is are was by "
    "of from to dozen hundred thousand million billion trillion pi sqrt sin cos tan log ln th st nd rd unless"
)
NO_UNIT = set(OTHER_WORDS.split())
WORD = re.compile(r"[a-zA-Z°]+")
POWERS = {"square": 2, "sq": 2, "cubic": 3}
PART = re.compile(
    r"(?P<per>/|per\b)?\s*(?:(?P<more>square|sq|cubic)\b)?\s*(?P<name>[a-zA-Z°]+)(?:\s*\^\s*\{?\s*(?P<power>-?\d))?"
)
LETTERS = set("mgshLNJWVAKCFl")


def is_unit(said: str, apart: bool, quoted: bool) -> bool:
    """Whether words behind a value are a unit, as cm, apples and \\text{...}, or a product of symbols, as mv and 2m."""
    words = WORD.findall(said)
    if not words or len(words) > 5 or {word.lower() for word in words} & NO_UNIT:
        return False
    if quoted:
        return True
    if any(len(word) == 1 for word in words):
        return "/" in said and {word for word in words if len(word) == 1} <= LETTERS
    return all(
        _name(word) in UNITS
        or word.lower() in COMPOUND
        or (len(word) >= (3 if apart else 4) and re.search("[aeiou]", word))
        for word in words
    )


def _name(word: str) -> str:
    word = word.lower()
    return word if word in UNITS else word.removesuffix("s")


def measure(unit: str) -> tuple[Counter, Fraction] | None:
    """Return what a unit measures, with powers, and its size: m/s^2; None if a word of it is no unit of measure."""
    dimension, size, sign = Counter(), Fraction(1), 1
    for part in PART.finditer(COMPOUND.get(unit.lower(), unit)):
        what = UNITS.get(_name(part["name"]))
        if what is None:
            return None
        sign = -1 if part["per"] else sign
        power = sign * int(part["power"] or POWERS.get(part["more"], 1))
        dimension[what[0]] += power
        size *= what[1] ** power
    return dimension, size
