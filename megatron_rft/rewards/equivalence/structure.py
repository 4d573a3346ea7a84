r"""Compares answers part by part: a list, set, tuple, interval, matrix or equation in the reference must be one in the
answer too. Only the smallest parts need algebra.

    3, 5          several values, in any order; \{3, 5\} is the same
    (3, 5)        in this order; brackets must be the same where one of them is square
    x = 3         the value 3 where the reference has no equation; else the same equation
    2 = 3 = 4     counts by its last member, and is wrong where numbers contradict each other
    50%           0.5; and 50 where the question asks for a percentage
"""

import re

from megatron_rft.rewards.equivalence import algebra
from megatron_rft.rewards.equivalence.intervals import BUILDER, intervals, is_name
from megatron_rft.rewards.equivalence.latex import one_spelling, split, squeeze
from megatron_rft.rewards.equivalence.rationals import based, number, rounds_to, same_number
from megatron_rft.rewards.equivalence.units import differ, without_unit

SEVERAL = r",(?!\d{3}(?!\d))|,\s|;|\\text\{\s*(?:,?\s*(?:and|or)),?\s*\}|(?<![A-Za-z])(?:and|or)(?![A-Za-z])"
COMMAS = r",|;"
RELATION = r"\\approx(?![a-z])|=|\\equiv(?![a-z])"
MATRIX = re.compile(  # also between its own brackets: ( \begin{array}{cc} ... \end{array} )
    r"[(\[]?\s*\\begin\{(p|b|B|v|V|small)?(?:matrix|array)\}(?:\{[^{}]*\})?(.*)\\end\{\w*(?:matrix|array)\}\s*[)\]]?",
    re.S,
)
LETTER = re.compile(r"\(?\s*(?:\\text\{)?\s*\(?([A-Z])\)?\s*\}?\s*\)?")
# After the first letter, a second choice: (A) (B), A. B., A: B:, A) or (B); not (A) X = 3.
SECOND_LETTER = re.compile(
    r"[\s).:,;}]*(?:\\text\{)?\s*(?:(?:or|and)\b[\s(}]*(?:\\text\{)?[\s(]*[A-Z](?![A-Za-z(])|\(?[A-Z]\s*[).:])"
)
WORDS = re.compile(r"(?:\\text\{)?\s*([A-Za-z][A-Za-z' -]+)\}?(?:\s+[A-Z])?")
PLAIN_MEMBER = re.compile(r"[({\s]*\d[\d.,]*\s*%?[)}\s]*")  # of a sum
FILLER_WORDS = (
    "the final answer is are value values of so thus therefore hence result equals equal we get total a an it "
    "solution solutions sum there approximately about "
)
FILLER = set(FILLER_WORDS.split())
EVERY = re.compile(
    r"[,;]?\s*\(?\s*(?:\\text\{\s*(?:where|for)[^{}]*\}|where|for(?: all)?)?\s*([a-zA-Z])\s*\\in\s*"
    r"(?:\\mathbb\s*\{?Z\}?|\\Z)\s*\)?$"
)
DEFINED = re.compile(r"([a-zA-Z])\s*\(\s*([a-z])\s*\)\s*=")
CONSTANT = re.compile(r"\+\s*(?:[cCkK]|\\text\{const(?:ant)?\.?\})$")  # of integration
ASKS_PERCENT = re.compile(
    r"(?:what|which|find|determine|calculate|express|as an?|in|nearest|the|how many)\b[^.?]{0,40}"
    r"(?<!\d)(?<!\d\s)(?<!\d\\)(?:percent|%|\\%)",
    re.IGNORECASE,
)


def equivalent(reference: str, answer: str, question: str = "") -> bool:
    """Return whether `answer` is equivalent to `reference`. `question` shows whether a percentage is asked for."""
    percent = bool(ASKS_PERCENT.search(question[-400:]))
    wanted, got = _trimmed(one_spelling(reference)), _trimmed(one_spelling(answer))
    if found := EVERY.search(wanted):
        if other := EVERY.search(got):
            got = _renamed(got, other[1], found[1])
        wanted, got = EVERY.sub("", wanted), EVERY.sub("", got)
    if (found := DEFINED.match(wanted)) and (other := DEFINED.match(got)) and found[1] == other[1]:
        got = _renamed(got, other[2], found[2])  # f(t) = t^2 for f(x) = x^2
    if re.search(r"\+\s*C$", wanted):
        got = CONSTANT.sub("+ C", got)
    return _same(wanted, got, percent)


def _renamed(text: str, old: str, new: str) -> str:
    """Rename a symbol of one letter."""
    return re.sub(rf"(?<![a-zA-Z\\]){old}(?![a-zA-Z])", new, text)


def value_of(answer: str) -> str:
    """Return the same text for equal values, for votes: "x = 1,234 apples" -> "1234", "2/4" -> "1/2"."""
    text = _trimmed(one_spelling(answer))
    if len(several := _several(text)) > 1:
        return ", ".join(map(value_of, several))
    text = split(text, RELATION)[-1]
    found = number(text) or number(without_unit(text)[0])
    if found is not None:
        return f"{found.value}"
    return squeeze(text)


def _same(wanted: str, got: str, percent: bool = False) -> bool:
    if not wanted or not got:
        return False
    if squeeze(wanted) == squeeze(got):
        return True
    for rule in (_words, _numbers, _bases, _members, _unions, _listed, _ordered, _matrices, _brackets, _ratios):
        verdict = rule(wanted, got, percent)
        if verdict is not None:
            return verdict
    return _formulas(wanted, got, percent)


def _trimmed(text: str) -> str:
    r"""Remove words that only introduce an answer: \text{The answer is } n."""
    text = text.removeprefix(r"\approx").removeprefix("=").strip()
    while found := re.match(r"\\text\{([^{}]*)\}\s*:?\s*|([A-Za-z]{2,})(?=[\s:])[\s:]*", text):
        words = (found[1] or found[2] or "").lower().replace(":", " ").replace("'", " ").split()
        if not words or not set(words) <= FILLER or found.end() == len(text):
            break
        text = text[found.end() :].removeprefix(r"\approx").removeprefix("=").strip()
    return text


def _words(wanted: str, got: str, percent: bool) -> bool | None:
    """Compare choices and words; None if the reference is mathematics."""
    if found := LETTER.fullmatch(wanted):
        letter = re.match(r"\(?(?:\\text\{)?\s*\(?([A-Z])(?:\)|\.|:|\s*\}|$)", got)
        if letter and SECOND_LETTER.match(got, letter.end(1)):
            return False
        return letter[1] == found[1] if letter else None
    if WORDS.fullmatch(wanted) and (len(wanted) > 3 or "text" in wanted or wanted.lower() in ("yes", "no")):
        first, second = (re.sub(r"\\text|[{}]|\b(the|an?)\b", " ", text.lower()).split() for text in (wanted, got))
        return first == second
    return None


def _numbers(wanted: str, got: str, percent: bool) -> bool | None:
    reference = number(wanted) or number(without_unit(wanted)[0])
    if reference is None:
        return None
    answer = number(got)
    if answer is None:
        if len(split(got, RELATION)) > 1:
            return None
        value, unit = without_unit(got, of_number=True)
        if differ(without_unit(wanted)[1], unit):
            return False
        answer = number(value)
    if answer is None:
        return None
    if same_number(reference, answer):
        return True
    if percent and reference.percent != answer.percent:
        parts = (reference, answer) if answer.percent else (answer, reference)
        return parts[0].value == parts[1].value * 100
    return False if "," not in wanted or "," not in got or (", " in wanted) == (", " in got) else None


def _bases(wanted: str, got: str, percent: bool) -> bool | None:
    reference, answer = based(wanted), based(got)
    if reference is None and answer is None:
        return None
    if reference and answer:
        return reference == answer
    if reference:  # the question says the base
        plain = got.replace(" ", "").upper()
        return reference[0] == plain if re.fullmatch(r"-?[0-9A-F.]+", plain) else None
    return answer[1] == 10 and _same(wanted, answer[0])


def _members(wanted: str, got: str, percent: bool) -> bool | None:
    """Compare equations and chains of equations."""
    if BUILDER.fullmatch(wanted) or BUILDER.fullmatch(got):
        return None
    if len(_several(wanted)) > 1 or len(_several(got)) > 1:
        return None
    ours, theirs = split(wanted, RELATION), split(got, RELATION)
    if len(ours) == 1 and len(theirs) == 1:
        return None
    if _contradicts(theirs) or not all(theirs):
        return False
    if len(ours) > 1 and len(theirs) > 1:
        named = squeeze(ours[0]) == squeeze(theirs[0])
        if named and _same(ours[-1], theirs[-1], percent):
            return True
        return len(ours) == len(theirs) == 3 and algebra.proportional((ours[0], ours[2]), (theirs[0], theirs[2]))
    if len(ours) > 1:
        return is_name(ours[0]) and _same(ours[-1], got, percent)
    if _same(wanted, theirs[-1], percent):
        return True
    return _is_rounded(theirs) and not unevaluated(theirs[-3], wanted) and _same(wanted, theirs[-3], percent)


def _contradicts(chain: list[str]) -> bool:
    """Return whether a chain contradicts itself, as 18 = 17. Roundings and unevaluated sums do not."""
    numbers = [found for member in chain[::2] if (found := number(without_unit(member)[0]))]
    rounded = "\\approx" in chain
    return any(
        not same_number(a, b) and not ((b.places or rounded) and rounds_to(a.value, b))
        for a, b in zip(numbers, numbers[1:], strict=False)
    )


def _is_rounded(chain: list[str]) -> bool:
    """Return whether the last member is a rounding of the one before: \\frac{10}{3} \\approx 3.33."""
    last = number(chain[-1])
    if last is None or (not last.places and chain[-2] != "\\approx"):
        return False
    before = number(chain[-3])
    exact = before.value if before else algebra.value(chain[-3])
    return exact is not None and rounds_to(exact, last)


def _unions(wanted: str, got: str, percent: bool) -> bool | None:
    """Compare intervals and unions of intervals."""
    ours, theirs = intervals(wanted), intervals(got)
    if len(ours) == 1 and len(theirs) == 1 and (ours[0], theirs[0]) == (wanted, got):
        return None
    return _any_order(ours, theirs, percent)


def _several(text: str) -> list[str]:
    r"""Return the values of a list or a set; \pm gives two values."""
    if BUILDER.fullmatch(text) or number(text):
        return [text]
    inner = text[2:-2] if text.startswith(r"\{") and text.endswith(r"\}") else text
    parts = [part for part in split(inner, SEVERAL)[::2] if part]
    if len(parts) > 1 and re.match(r".*=", parts[0]) and not any("=" in part for part in parts[1:]):
        parts[0] = parts[0].rpartition("=")[2].strip()  # x = 2, 3
    return [each for part in parts for each in _signs(part)] or [text]


def _signs(part: str) -> list[str]:
    if not re.search(r"\\pm(?![a-z])", part):
        return [part]
    upper = re.sub(r"\\mp(?![a-z])", "-", re.sub(r"\\pm(?![a-z])", "+", part))
    lower = re.sub(r"\\mp(?![a-z])", "+", re.sub(r"\\pm(?![a-z])", "-", part))
    return [upper.strip().removeprefix("+").strip(), lower]


def _listed(wanted: str, got: str, percent: bool) -> bool | None:
    ours, theirs = _several(wanted), _several(got)
    a_set = wanted.startswith(r"\{") or got.startswith(r"\{")
    if len(ours) == len(theirs) == 1:
        return _same(ours[0], theirs[0], percent) if (ours[0], theirs[0]) != (wanted, got) else None
    names = [split(each, "=")[0] for each in ours if "=" in each]
    if len(set(names)) == len(ours) and not any("=" in each for each in theirs):  # 1, 2 for x = 1, y = 2
        return _in_order(ours, theirs if len(theirs) > 1 else _parts(_bare(got) or got))
    if len(theirs) == 1 and not a_set:  # (3, 5) for 3, 5
        return _in_order(ours, _parts(_bare(got) or got))
    if len(ours) == 1:
        if number(wanted) or a_set or re.search(r"^\[|\]$", wanted):
            return False
        return _in_order(_parts(_bare(wanted) or wanted), theirs)
    return _any_order(ours, theirs, percent)


def _in_order(ours: list[str], theirs: list[str]) -> bool:
    return len(ours) == len(theirs) and all(map(_same, ours, theirs))


def _any_order(ours: list[str], theirs: list[str], percent: bool) -> bool:
    if len(ours) != len(theirs) or len(ours) > 50:
        return False
    left = list(theirs)
    for each in ours:
        found = next((k for k, other in enumerate(left) if _same(each, other, percent)), None)
        if found is None:
            return False
        left.pop(found)
    return True


def _bare(text: str) -> str:
    r"""Return the inside of (a, b), [a, b] or \langle a, b \rangle; "" for other texts."""
    text = _round(text)
    if len(text) < 3 or text[0] not in "([" or text[-1] not in ")]" or len(_parts(text[1:-1])) < 2:
        return ""
    return text[1:-1] if _balanced(text[1:-1]) else ""


def _round(text: str) -> str:
    return text.replace(r"\langle", "(").replace(r"\rangle", ")").strip()


def _balanced(text: str) -> bool:
    depth = 0
    for letter in text:
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(letter, 0)
        if depth < 0:
            return False
    return depth == 0


def _parts(text: str) -> list[str]:
    return split(text, COMMAS)[::2]


def _ordered(wanted: str, got: str, percent: bool) -> bool | None:
    """Compare points, vectors and intervals."""
    first, second = _bare(wanted), _bare(got)
    if not first or not second:
        return None if not first and not second or MATRIX.fullmatch(got if first else wanted) else False
    ours, theirs = _parts(first), _parts(second)
    brackets = [_round(text)[0] + _round(text)[-1] for text in (wanted, got)]
    return (len(ours) != 2 or brackets[0] == brackets[1]) and _in_order(ours, theirs)


def _matrices(wanted: str, got: str, percent: bool) -> bool | None:
    first, second = MATRIX.fullmatch(wanted), MATRIX.fullmatch(got)
    if not first and not second:
        return None
    if first and second and (first[1] in ("v", "V")) != (second[1] in ("v", "V")):
        return False
    ours, theirs = _entries(wanted, first), _entries(got, second)
    if not first or not second:  # (1, 2) for a column or a row
        ours, theirs = ([[each] for row in rows for each in row] for rows in (ours, theirs))
    shapes = [[len(row) for row in rows] for rows in (ours, theirs)]
    return shapes[0] == shapes[1] and all(
        _same(a, b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True)
    )


def _entries(text: str, matrix: re.Match | None) -> list[list[str]]:
    if matrix is None:
        return [_parts(_bare(text) or text)]
    rows = [row for row in split(matrix[2], r"\\\\(?:\[[^\]]*\])?")[::2] if row]
    return [split(row, "&")[::2] for row in rows]


def _brackets(wanted: str, got: str, percent: bool) -> bool | None:
    """Remove brackets around the whole text: (x + 1) -> x + 1."""
    for text in (wanted, got):
        if text[:1] in "({" and text[-1:] in ")}" and _balanced(text[1:-1]) and text[1:-1].strip():
            inner = text[1:-1].strip()
            return _same(inner, got, percent) if text is wanted else _same(wanted, inner, percent)
    return None


def _ratios(wanted: str, got: str, percent: bool) -> bool | None:
    """3:5 is 3 to 5 and 3/5."""
    ratio = re.compile(r"(\d+(?:\.\d+)?)\s*(?::|\\text\{\s*to\s*\}|to)\s*(\d+(?:\.\d+)?)")
    first, second = ratio.fullmatch(wanted), ratio.fullmatch(got)
    if not first and not second:
        return None
    ours, theirs = (f"\\frac{{{m[1]}}}{{{m[2]}}}" if m else text for m, text in ((first, wanted), (second, got)))
    if first and second:
        return first.groups() == second.groups()  # 3:00 is a time
    return None if ours == theirs else "\\frac" in ours + theirs and _same(ours, theirs)


def _formulas(wanted: str, got: str, percent: bool) -> bool:
    (ours, unit), (theirs, other) = without_unit(wanted), without_unit(got)
    if differ(unit, other):
        return False
    if unit or (other and not re.search("[a-zA-Z]", re.sub(r"\\[a-z]+", "", ours))):
        wanted, got = ours, theirs
    if "\\text" in wanted + got or re.search(r"[=<>]|\\(?:le|ge|ne)(?![a-z])", got) or unevaluated(got, wanted):
        return False
    if unit == "°" and algebra.equal(f"{ours}°", got):
        return True
    return algebra.equal(wanted, f"{theirs}°" if other == "°" and not number(wanted) else got)


def unevaluated(got: str, wanted: str) -> bool:
    """A sum or product of plain numbers, where the reference is its value: 57 + 87 for 144; also a sum with two plain
    members and others, 57 + 87 + 0^2. A power is a value, and so are a quotient and a mixed number where the reference
    is a fraction."""
    reference, got = number(without_unit(wanted)[0]), re.sub(r"\^(?:\{\s*1\s*\}|1(?!\d))", "", got)
    if not reference or number(got):
        return False
    if sum(PLAIN_MEMBER.fullmatch(member) is not None for member in split(got, r"[+\-]")[::2]) > 1:
        return True
    if re.search(r"[a-zA-Z!^]", re.sub(r"\\(?:cdot|frac|div)(?![a-z])", "", got)):
        return False
    if reference.value.denominator > 1 and re.fullmatch(r"\d+ ?\+ ?\\frac\{\d+\}\{\d+\}", got):
        return False
    signs = r"[+\-/]|\\cdot|\\div" if reference.value.denominator == 1 else r"[+\-]"
    return re.search(rf"[\d)}}]\s*(?:{signs})\s*[-+({{\d\\.]", got) is not None
