r"""What a response gives as its answer.

    boxed    only the last \boxed{...}
    marked   a box; else "#### ..." that is no heading; else <answer>...</answer>; else "the answer is ..."; else the
             last line, where it is a bare value or says one ("57 + 87 = 144.", "She has 12 apples."); else what the
             response says that a formula of the question is
    any      as marked, else the last number or formula

Boxes that stand in one list ("\boxed{5} or \boxed{7}") are one answer with several values. Code blocks are no prose.
"""

import re

from megatron_rft.rewards.base import without_thoughts
from megatron_rft.rewards.equivalence.disguise import MATHS, formulas
from megatron_rft.rewards.equivalence.reader import read
from megatron_rft.rewards.equivalence.trees import value_of

BOX = re.compile(r"\\boxed(?:\s*(?=\{)|\s+(?P<bare>[^\s${}]+))")
FENCED = re.compile(r"(```|~~~).*?(?:\1|\Z)", re.DOTALL)
# Between two boxes of one list: signs, single letters and these words; not "no, it is".
APART = re.compile(r"but maybe|[A-Za-z]{2,}|(?<!_\{)(?<!_)\d+(?![.)])|[+^<>]")
JOINING = {"or", "and", "also", "but maybe", "maybe", "perhaps", "possibly", "it", "is", "could", "be", "text", "cup"}
JOINING |= {"dots", "ldots", "cdots", "quad", "qquad"}
ADVERB = r"\s*(?:therefore|thus|then|simply|just|also|now|indeed|actually|exactly|equal to)?\s*"
MARK = re.compile(
    r"^[ \t*]*A[ *]*:|(?<!possible )(?<!wrong )(?<!incorrect )\b"
    r"(?:ans(?:wers?)?|respuestas?|soluci[óo]n|resultado)\b(?:[^.\n=:]|\.\d){0,80}?"
    rf"(?:\b(?:is|are|was|be|equals|becomes|es|son)\b{ADVERB}[:=]?|:|=)"
    r"|(?<!错误)(?<!可能的)(?:答案|结果)(?:】|(?:应该?|就)?[是为]|[*\s]*[:：])+|^\W*答[:：]",
    re.IGNORECASE | re.MULTILINE,
)
END = (
    r"。|\.(?=\s|\*|$|\")|\n|[!?](?=\s|$)|\s(?:because|since|which|as|where|so|but|I hope)\b"
    r"|, (?=(?:and|the) [^.\n]*\bis\b|not\b)"
)
VERB = re.compile(
    r"\b(?:is|are|was|were|be|equals?|gives?|gets?|got|makes?|made|has|have|had|leaves?|left with|totals|becomes?|"
    r"costs?|earns?|needs?|takes?|paid|pays?|spen[dt]s?|same as|(?:up|comes|amounts|adds|sums) to|total of)\b"
    rf"{ADVERB}(?:at (?!least|most))?|\b(?:it|that)['’]s\b|(?<!\d):|→|⇒|=>|=|≈",
    re.IGNORECASE,
)
REMARK = re.compile(r"(?<=\S)\s+\((?:[A-Za-z][^()]*\)|[^()\]]*)$")  # 144 (one hundred forty-four), and 65 (18 +
LAST = re.compile(r"[-+]?(?:[\d(][\d\s.,()+*/^×÷−=-]*[\d)]|\d)%?")
COURTESY = re.compile(r"(i hope|let me know|feel free|is there anything|hope this)\b", re.IGNORECASE)
WORD = re.compile(r"(?<![\\a-zA-Z])[A-Za-z]{2,}")
LONGEST = 400  # characters of an answer that is no box
TAIL = 4000  # characters of an unmarked response that are searched
DENIED_IN_SPANISH = re.compile(r"\b(?:no|quiz[áa]s?|tal vez|incorrect[ao]|equivocad[ao]|err[óo]ne[ao]|posibles?)\b")
DENIED = re.compile(
    r"\b(?:not|cannot|never|isn't|maybe|perhaps|possibly|(?:could|might|may) be|unless|wrong|incorrect"
    r"|possible answers?|(?:unknown|undefined|n?either)(?=\s+\w))\b|(?<=\w )if\b|\(\s*(?:or|and)\b|\?"
    r"|^\W*(?:between|(?:more|less|greater|fewer) than|at (?:least|most))\b",
    re.IGNORECASE,
)


def final_answer(text: str, how: str = "marked", question: str = "") -> str | None:
    """Return the response's answer as written; None if it has none, or ends inside the box."""
    text = FENCED.sub("\n", without_thoughts(text))
    box = _last_box(text)
    if how != "boxed" and (found := _hashed(text[box[0] :] if box else text, words=0 if box else 5)):
        return found
    if box or how == "boxed":
        return (box[1] or None) if box else None
    _, opened, tagged = text.rpartition("</answer>")[0].rpartition("<answer>")
    if opened:
        return _clean(tagged)
    prose = text[-TAIL:]
    stated = _stated(prose)
    if stated and question and not WORD.search(question) and _kind(stated) in ("", "text"):
        stated = None  # "19 + 10 is 29, the answer is no.": a sum is not answered by words
    found = stated or _concluded(prose) or _asked(prose, question)
    return found or (_last(prose) if how == "any" else None)


def _kind(text: str) -> str:
    """The kind of tree of a text's value: "n" for a number; "" for no formula."""
    return value_of(read(text) or ("",))[0]


def _last_box(text: str) -> tuple[int, str | None] | None:
    """Where the last box begins, and what it and the boxes of its list hold; None for a box that is left open."""
    found = [(match.start(), *_content(text, match)) for match in list(BOX.finditer(text))[-20:]]
    found = [each for k, each in enumerate(found) if not (k and each[0] < found[k - 1][2])]
    if not found or found[-1][1] is None:
        return found[-1][:2] if found else None
    values = [_clean(found[-1][1])]
    for before, after in zip(found[-2::-1], found[:0:-1], strict=False):
        between = text[before[2] : after[0]]
        if before[1] is None or len(between) > 80 or {each.lower() for each in APART.findall(between)} - JOINING:
            break
        values.append(_clean(before[1]))
    return found[-1][0], ", ".join(dict.fromkeys(reversed(values)))


def _content(text: str, match: re.Match) -> tuple[str | None, int]:
    """Return the content of a box with balanced braces, and its end."""
    if match["bare"]:
        return match["bare"], match.end()
    depth = 0
    for place in range(match.end(), len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0) if text[place - 1] != "\\" else 0
        if depth == 0:
            return text[match.end() + 1 : place], place + 1
    return None, len(text)


def _hashed(text: str, *, words: int) -> str | None:
    """Return the last value after "####"; words, as in "#### Paris", are an answer only at the end, else a heading."""
    for part in reversed(text.split("####")[1:]):
        line, _, rest = part.lstrip("#").partition("\n")
        if found := _value(line, words=0 if rest.strip() else words):
            return found
    return None


def _clauses(text: str, end: str = END) -> list[str]:
    """Cut prose at the ends of sentences and before clauses, but not within mathematics. A question keeps its mark."""
    clauses, place = [], 0
    for found in re.finditer(end, _masked(text)):
        clauses.append(text[place : found.start()] + "?" * (found[0] == "?"))
        place = found.end()
    return [*clauses, text[place:]]


def _masked(text: str) -> str:
    return MATHS.sub(lambda formula: "$" * len(formula[0]), text)


def _stated(text: str) -> str | None:
    """Return the text after the last "answer is" or "Answer:"."""
    for match in reversed(list(MARK.finditer(text))):
        rest = text[match.end() :][: 2 * LONGEST].lstrip(" *_\n：").removeprefix("that ")
        denied = DENIED.search(match[0]) or DENIED_IN_SPANISH.search(match[0])
        if not denied and (found := _value(_clauses(rest)[0], words=5)):
            return found
    return None


def _concluded(text: str) -> str | None:
    """Return the value that the last line states; later clauses without a number count as comments."""
    lines = [line.strip(" \t*#>_`") for line in _clauses(text, "\n")]
    lines = [line for line in lines if line and not COURTESY.match(line)] or [""]
    short = len(lines) == 1 and len(lines[0].split()) <= 2 and not VERB.search(lines[0])
    if bare := _value(lines[-1].rstrip("."), words=2 * short):
        return bare
    for clause in reversed(_clauses(lines[-1])):
        if (found := _said(clause.strip(" *_\"'"))) or re.search(r"\d", clause) or DENIED.search(clause):
            return found
    return None


def _said(clause: str) -> str | None:
    """Return the value at the end of a clause, after its last verb or sign of equality, or that "is the answer"."""
    if DENIED.search(clause):
        return None
    before, _, after = clause.partition(" is the ")
    if after.split()[-1:] == ["answer"]:
        return _value(before.split()[-1])
    for match in reversed(list(VERB.finditer(_masked(clause)))):
        if found := _value(clause[match.end() :].strip(" *:")):
            return found
    formulas = list(MATHS.finditer(clause))
    return _clean(formulas[-1][0]) if formulas and "=" in formulas[-1][0] else None


def _asked(text: str, question: str) -> str | None:
    """Return the last value that the response gives to a formula of the question: "61 - 48 is 13. Subtraction ..."."""
    for clause in reversed(_clauses(text)):
        if DENIED.search(clause):
            return None
        for match in VERB.finditer(clause):
            found = _value(clause[match.end() :])
            if found and read(WORD.split(clause[: match.start()])[-1]) in formulas(question):
                return found
    return None


def _value(text: str, *, words: int = 0) -> str | None:
    """Return the text if it is a value: mathematics, a number with its unit, or at most so many words."""
    if len(text) > 2 * LONGEST or DENIED.search(text):  # at first, because a clause may have hundreds of verbs
        return None
    text = REMARK.sub("", text.strip('*_`" \n\t')).strip().strip("'")
    if not text or len(text) > LONGEST or text[-1] in "+-*/=":
        return None
    if MATHS.match(text):
        return _clean(text) if len(MATHS.sub("", text).split()) <= 4 else None
    said = WORD.findall(re.sub(r"\\[a-zA-Z]+\{?", "", text))
    return _clean(text) if len(said) <= words or (not text[0].isalpha() and _kind(text) == "n") else None


def _last(text: str) -> str | None:
    """Return the last formula or number."""
    found = [*list(MATHS.finditer(text))[-1:], *list(LAST.finditer(text))[-1:]]
    return _clean(max(found, key=re.Match.end)[0]) if found else None


def _clean(answer: str) -> str:
    """Remove outer dollar signs, emphasis, ends of lines and a final full stop."""
    answer = " ".join(answer.strip().strip("*_`").split())
    if len(answer) > 1 and answer[0] == answer[-1] == "$" and "$" not in answer[1:-1]:
        answer = answer[1:-1].strip()
    return answer.removesuffix(".").strip()
