"""Answers in words: numbers and ordinals, dates, and "Yes, it is"."""

import re
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
