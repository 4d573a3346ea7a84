"""Splits units from values and compares them: 864 inches^2, 5 apples, 22.1cm^{2}. Text only."""

import re

UNIT = re.compile(
    r"(?P<value>.*[\d})!\]])\s*(?P<unit>(?:\\text\{[^{}\d]*\}|(?<=[\d})\s])"
    r"(?:[a-zA-Z]{2,}|[mgshLNJWVAKCFl](?![a-zA-Z]))"
    r"(?:[ ./]+[a-zA-Z]+)*)(?:\s*\^\s*\{?(?P<power>[23])\}?)?|°\s*[CF]?)"
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
    "kilogram | l liter litre | ml milliliter | cent | dollar"
)
MEASURES = [set(names.split()) for names in MEASURE_NAMES.split("|")]


def without_unit(text: str) -> tuple[str, str]:
    """ "864 \\text{inches}^2" -> ("864", "inches^2"). The unit is "" where there is none."""
    found = UNIT.fullmatch(text)
    if found is None:
        return text, ""
    unit = re.sub(r"\\text|[{}]|\s+", " ", found["unit"]).strip()
    words = re.findall("[a-z]+", unit.lower())
    if set(words) & NO_UNIT or len(words) > 4:
        return text, ""
    return found["value"].strip(), unit


def differ(unit: str, other: str) -> bool:
    """Return whether two units of measure are certainly different: cm and m, cm^2 and cm^3."""

    def measure(text: str) -> tuple[int, str] | None:
        name = re.sub(r"[^a-z]", "", text.lower()).removesuffix("s") or text
        power = re.search(r"[23]$", text)
        known = next((k for k, names in enumerate(MEASURES) if name in names or text.lower() in names), None)
        return None if known is None else (known, power[0] if power else "1")

    first, second = measure(unit), measure(other)
    return first is not None and second is not None and first != second
