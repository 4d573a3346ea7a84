"""Normalises intervals and their unions, such as x < 2 or x > 3, {x | -2 <= x < 1}. Text only."""

import re

from megatron_rft.rewards.equivalence.latex import split

ORDER = r"\\le(?![a-z])|\\ge(?![a-z])|<|>"
BUILDER = re.compile(r"\\\{\s*\(?\s*(?P<name>[a-zA-Z])\s*\)?\s*(?:\\in\s*\S+\s*)?[|:]\s*(?P<condition>.*)\\\}", re.S)
MEMBER = re.compile(r"^\(?[a-zA-Z]\)?\s*\\in(?![a-z])\s*")
NAME = r"\\?[a-zA-Z]+(?:_\{?\w+\}?)?'?(?:\([a-z](?:, ?[a-z])*\))?"
REALS = re.compile(r"\\mathbb\s*\{?R\}?|\\R|\\text\{(?:all )?real(?: number)?s\}|all reals|all real numbers")
ALL_BUT = re.compile(
    rf"(?:{NAME}\s*\\ne(?![a-z])|(?:{REALS.pattern})\s*(?:\\setminus|\\backslash|-)\s*\\\{{)([^,{{}}]+)(?:\\\}})?"
)
OR = re.compile(r"\\text\{\s*or\s*\}|(?<![a-z])or(?![a-z])|\\lor(?![a-z])|,(?=[^,]*(?:[<>]|\\[lg]e(?![a-z])))")
LESS = {"<": ("(", ")"), r"\le": ("[", "]")}
TURNED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}


def is_name(text: str) -> bool:
    """Return whether the text is a name that an equation can define: x, f(x), C, S_n, (x, y)."""
    return re.fullmatch(rf"{NAME}|\([a-zA-Z](?:, ?[a-zA-Z])+\)", text.strip()) is not None


def intervals(text: str) -> list[str]:
    """Split a union into its parts, with inequalities as intervals. Other texts are returned unchanged."""
    text = MEMBER.sub("", text)
    if REALS.fullmatch(text):
        return [r"(-\infty, \infty)"]
    if found := BUILDER.fullmatch(text):
        text = MEMBER.sub("", found["condition"].strip())
    if found := ALL_BUT.fullmatch(text):
        return [rf"(-\infty, {found[1].strip()})", rf"({found[1].strip()}, \infty)"]
    parts = split(text, r"\\cup(?![a-z])")[::2]
    alternatives = split(text, OR.pattern)[::2]
    if len(parts) == 1 and all(len(split(each, ORDER)) > 1 for each in alternatives):
        parts = alternatives
    return [interval(part) for part in parts]


def interval(text: str) -> str:
    r"""Rewrite -2 \le x < 1 as [-2, 1). Other texts are returned unchanged."""
    parts = split(text, ORDER)
    if len(parts) == 5 and parts[1] in LESS and parts[3] in LESS and is_name(parts[2]):
        return f"{LESS[parts[1]][0]}{parts[0]}, {parts[4]}{LESS[parts[3]][1]}"
    if len(parts) == 5 and parts[1] not in LESS and parts[3] not in LESS:
        return interval(f"{parts[4]} {TURNED[parts[3]]} {parts[2]} {TURNED[parts[1]]} {parts[0]}")
    if len(parts) == 3 and is_name(parts[2]) and not is_name(parts[0]):
        parts = [parts[2], TURNED[parts[1]], parts[0]]
    if len(parts) != 3 or not is_name(parts[0]):
        return text
    _, sign, bound = parts
    return rf"(-\infty, {bound}{LESS[sign][1]}" if sign in LESS else f"{'(' if sign == '>' else '['}{bound}, \\infty)"
