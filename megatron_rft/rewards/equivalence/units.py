"""Splits units from values and compares them: 864 inches^2, 5 apples, 22.1cm^{2}. Text only."""

import re

PIECE = r"(?:\\text\{[^{}\d]*(?:\^[23])?[^{}\d]*\}|[a-zA-Z]+)(?:\s*\^\s*(?:\{\s*-?\d\s*\}|\d))?"
UNIT = re.compile(
    rf"(?P<value>.*[\d)}}!\]])(?P<space>\s*)(?P<unit>{PIECE}(?:(?:\s*[./]\s*|\s*\\cdot\s*|\s+){PIECE})*|°\s*[CF]?)"
)
# Words after a number that are not its unit
OTHER_WORDS = (
    "or and not maybe perhaps possibly either else but if mod base plus minus times over less more than is are was "
    "by of from to dozen hundred thousand million billion trillion pi sqrt sin cos tan log ln "
)
NO_UNIT = set(OTHER_WORDS.split())
MEASURE_NAMES = (
    "cm centimeter centimetre | mm millimeter millimetre | m meter metre | km kilometer kilometre | in inch inche "
    "| ft foot feet | mi mile | s sec second | min minute | h hr hour | day | week | yr year | g gram | kg "
    "kilogram | l liter litre | ml milliliter | cent | dollar | am | pm"
)
MEASURES = [set(names.split()) for names in MEASURE_NAMES.split("|")]
OTHER_MEASURES = "sq mph kph kmh rpm mg lb oz nm hz khz mhz kw kwh mw pa kpa mol rad deg ev kev mev gev hp ly gb mb kb"
KNOWN = set.union(*MEASURES, OTHER_MEASURES.split())
LETTERS = set("mgshLNJWVAKCFl")


def without_unit(text: str, *, of_number: bool = False) -> tuple[str, str]:
    """ "864 \\text{inches}^2" -> ("864", "inches^2"). The unit is "" where there is none. `of_number`: the text stands
    for a number, so that the m of 2m is a unit and not a symbol."""
    found = UNIT.fullmatch(text)
    if found is None:
        return text, ""
    unit = re.sub(r"\\text|\\cdot|[{}]|\s+", " ", found["unit"]).strip()
    words = re.findall("[a-zA-Z]+", unit)
    if {word.lower() for word in words} & NO_UNIT or len(words) > 4:
        return text, ""
    if words and "\\text" not in found["unit"] and not _is_unit(words, of_number or bool(found["space"]), "/" in unit):
        return text, ""
    return found["value"].strip(), unit


def _is_unit(words: list[str], apart: bool, quotient: bool) -> bool:
    """Whether words outside of \\text{} are a unit, as cm, 5 m and m/s are, or a product of symbols, as mv and 2m."""
    if any(len(word) == 1 for word in words):
        letters = all(word in LETTERS for word in words if len(word) == 1)
        return letters and (quotient or (apart and len(words) == 1))
    return all(
        word.lower().removesuffix("s") in KNOWN or (len(word) >= (3 if apart else 4) and re.search("[aeiou]", word))
        for word in words
    )


def differ(unit: str, other: str) -> bool:
    """Return whether two units of measure are certainly different: cm and m, cm^2 and cm^3."""

    def measure(text: str) -> tuple[int, str] | None:
        name = re.sub(r"[^a-z]", "", text.lower()).removesuffix("s") or text
        power = re.search(r"[23]$", text)
        known = next((k for k, names in enumerate(MEASURES) if name in names or text.lower() in names), None)
        return None if known is None else (known, power[0] if power else "1")

    first, second = measure(unit), measure(other)
    return first is not None and second is not None and first != second
