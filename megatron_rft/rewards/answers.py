r"""What a response gives as its answer.

    boxed    only the last \boxed{...}
    marked   a box; else "#### ..." that is no heading; else <answer>...</answer>; else "the answer is ..."; else the
             last line, where it is a bare value or says one ("57 + 87 = 144.", "She has 12 apples."); else what the
             response says that a formula of the question is
    any      as marked, else the last number or formula

Boxes that stand in one list ("\boxed{5} or \boxed{7}") are one answer with several values. Code blocks are no prose.
"""

import re

from megatron_rft.rewards.equivalence.compare import spelled
from megatron_rft.rewards.equivalence.disguise import MATHS, stands_in
from megatron_rft.rewards.equivalence.reader import Unread, read
from megatron_rft.rewards.equivalence.values import TookTooLong, time_limit

BOX = re.compile(r"\\boxed(?:\s*(?=\{)|\s+(?P<bare>[^\s${}]+))")
FENCED = re.compile(r"(```|~~~).*?(?:\1|\Z)", re.DOTALL)
TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE)
# Between two boxes of one list: signs, single letters and these words; not "no, it is".
APART = re.compile(r"but maybe|[A-Za-z]{2,}|(?<!_)(?<!_\{)[\d.]*\d(?![.)])|[+^<>]")
JOINING = {"or", "and", "also", "but maybe", "maybe", "perhaps", "possibly", "either", "it", "is", "could", "be"}
JOINING |= {"text", "cup", "dots", "ldots", "cdots", "quad", "qquad"}
MARK = re.compile(
    r"^[ \t*]*A[ *]*:|(?<!possible )(?<!wrong )(?<!incorrect )\bans(?:wers?)?\b(?:[^.\n=:]|\.\d){0,80}?"
    r"(?:(?<!\w)(?:is|are|was|be|equals|becomes)(?!\w)"
    r"\s*(?:therefore|thus|then|simply|just|also|indeed|actually|exactly|equal to)?\s*[:=]?|:|=)",
    re.IGNORECASE | re.MULTILINE,
)
END = re.compile(
    r"\.(?=\s|\*|$|\")|\n|[!?](?=\s|$)|\s(?:because|since|which|as|where|so|but|I hope)\b|,? and (?=[^.\n]*\bis\b)"
)
VERB = re.compile(
    r"\b(?:is|are|was|were|be|equals?|gives?|gets?|got|makes?|made|has|have|had|leaves?|left with|totals|becomes?|"
    r"costs?|earns?|needs?|takes?|paid|pays?|spen[dt]s?|same as|(?:equals?|up|comes|amounts|adds|sums) to|total of)\b"
    r"\s*(?:exactly|simply|therefore|then|now|at)?|\b(?:it|that)['’]s\b|(?<!\d):|→|⇒|=>",
    re.IGNORECASE,
)
VALUE = re.compile(
    r"[-+]?[$€£]?\s?[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:\s?/\s?\d+)?(?:\s?%|°)?"
    r"(?:[ -](?!(?:is|are|was|and|or|plus|minus|times|by|of|to|from|than)\b)[A-Za-z'²³]+){0,4}"
)
FIRST = re.compile(
    r"(?:so|thus|therefore|hence|then)?,?\s*(?P<value>[-+]?\$?\d[\d,.]*)\s+is\s+(?:the|our|your)\s+(?:\w+\s+)?"
    r"(?:answer|result|solution|sum|difference|total|product)\b",
    re.IGNORECASE,
)
SENTENCES = re.compile(r"(?<=[^\d\s])[.!](?:\s|$)|(?<=\d)\.(?:\s|$)|(?<=\?)\s")  # a question keeps its mark
EQUALS = re.compile(r"=|≈|\\approx|→|⇒")
EQUATION = re.compile(
    r"(?P<formula>[-(]?\d[\d\s.()+*/^×÷−-]*[\d)])\s*(?:=|,? which is|is|equals|is equal to)\s*\$?"
    r"(?P<value>-?\d[\d,]*(?:\.\d+)?)(?!\s*[-+*/×÷\d])"
)
REMARK = re.compile(r"(?<=\S)\s+\((?:[A-Za-z][^()]*\)|[^()\]]*)$")  # 144 (one hundred forty-four), and 65 (18 +
HASHES = re.compile(r"(?<!#)#{4,}((?:(?!####)[^\n])+)")
# After "####" and no answer: "Step 1: add", "Verification of x = 3", "Final Answer".
HEADING = re.compile(
    r"[*_\s]*(?:(?:step|part|case|method|approach|solution|example)\s*(?:\d|[A-Z]\b)"
    r"|(?:verif|check|expla|justif|proof|remark|note\b|summary|alternative)"
    r"|(?:(?:the\s+)?(?:final\s+)?(?:answer|result|solution)|conclusion|step|part|case)s?[*_:\s]*$)",
    re.IGNORECASE,
)
# Mathematics over several lines between \[ and \] or $$ and $$, without an empty line.
DISPLAY = re.compile(r"\\\[(?:(?!\n\s*\n|\\\[).)*?\\\]|\$\$(?:(?!\n\s*\n).)*?\$\$", re.DOTALL)
LIST = re.compile(r"(?:(?:\$[^$]+\$|\\\((?:(?!\\\)).)+\\\))(?:,|\s|and|or)*){2,}\Z", re.DOTALL)
LAST = re.compile(r"[-+]?(?:[\d(][\d\s.,()+*/^×÷−=-]*[\d)]|\d)%?")
COURTESY = re.compile(r"(i hope|let me know|feel free|is there anything|hope this)\b.*", re.IGNORECASE)
WORD = re.compile(r"(?<![\\a-zA-Z])[A-Za-z]{2,}")
LONGEST = 400  # characters of an answer that is no box
TAIL = 4000  # characters of an unmarked response that are searched
HEDGES = re.compile(
    r"\b(?:not|cannot|never|isn't|maybe|perhaps|possibly|(?:could|might|may) be|unless"
    r"|(?:unknown|undefined|n?either)(?=\s+\w)|(?<!difference )between)\b|(?<=\w )if\b|\(\s*(?:or|and)\b"
    r"|^\W*(?:(?:more|less|greater|fewer) than|at (?:least|most))\b",
    re.IGNORECASE,
)
DENIED = re.compile(
    r"\b(?:wrong|incorrect|false|possible answers?)\b|\?", re.IGNORECASE
)  # "... is wrong", "is it 144?"
INTEGER = re.compile(r"-?(\d{1,15}|[1-9]\d{0,2}(,\d{3}){1,4})", re.ASCII)  # 17, -3, 1,234: not 12,34


@time_limit()
def final_answer(text: str, how: str = "marked", question: str = "") -> str | None:
    """Return the response's answer as written; None if it has none, or ends inside the box."""
    text = FENCED.sub("\n", text.rpartition("</think>")[2].partition("<think>")[0])
    box = _last_box(text)
    if how != "boxed" and (found := _hashed(text[box[0] :] if box else text, value=box is not None)):
        return found
    if box or how == "boxed":
        return (box[1] or None) if box else None
    if tagged := TAGGED.findall(text):
        return _clean(tagged[-1])
    prose = DISPLAY.sub(lambda display: re.sub(r"\s*\n\s*", " ", display[0]), text[-TAIL:])
    stated = _stated(prose)
    if stated and not (re.search(r"\d", stated) or is_number(stated) or WORD.search(question or "of")):
        stated = None  # "19 + 10 is 29, the answer is no.": a sum is not answered by words
    found = stated or _concluded(prose, question) or _asked(prose, question)
    return found or (_last(prose) if how == "any" else None)


@time_limit()
def vote(answer: str) -> str:
    """Return the same text for equal answers, for majority votes."""
    try:
        return spelled(read(answer))
    except (Unread, TookTooLong):
        return answer


def is_number(text: str) -> bool:
    try:
        return read(text)[0] == "n"
    except (Unread, TookTooLong):
        return False


def _last_box(text: str) -> tuple[int, str | None] | None:
    """Where the last box begins, and what it and the boxes of its list hold; None for a box that is left open."""
    found = [(match.start(), *_content(text, match)) for match in list(BOX.finditer(text))[-20:]]
    found = [each for k, each in enumerate(found) if not (k and found[k - 1][2] and each[0] < found[k - 1][2])]
    if not found:
        return None
    place, content, _ = found[-1]
    if content is None:
        return place, None
    values = [_clean(content)]
    for before, after in zip(found[-2::-1], found[:0:-1], strict=False):
        between = text[before[2] : after[0]]
        if before[1] is None or len(between) > 80 or {each.lower() for each in APART.findall(between)} - JOINING:
            break
        values.append(_clean(before[1]))
    return place, ", ".join(dict.fromkeys(reversed(values)))


def _hashed(text: str, *, value: bool) -> str | None:
    """Return the last answer after "####" that is no heading; `value`: words, as in "#### Paris", are no answer."""
    lines = [match[1].strip() for match in HASHES.finditer(text)]
    lines = [line for line in lines if line and not HEADING.match(line)]
    return next((_clean(line) for line in reversed(lines) if not value or re.search(r"\d|\\[a-zA-Z]", line)), None)


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


def _stated(text: str) -> str | None:
    """Return the text after the last "answer is" or "Answer:"."""
    for match in reversed(list(MARK.finditer(text))):
        rest = text[match.end() :].lstrip(" *_\n").removeprefix("that ")
        if HEDGES.search(match[0]):
            continue
        if found := _value(_sentence(rest), stated=True):
            return found
    return None


def _concluded(text: str, question: str) -> str | None:
    """Return the value that the last line states; later sentences without a number count as comments."""
    lines = [line.strip(" \t*#>_`") for line in text.splitlines()]
    lines = [line for line in lines if line and not COURTESY.match(line)]
    if not lines:
        return None
    bare = None if FIRST.match(lines[-1]) else _value(lines[-1].rstrip("."), bare=True)
    if bare and (len(lines) == 1 or re.search(r"[\d\\$]", bare)):
        return bare
    sentences = [each.strip(" *_\"'") for each in SENTENCES.split(lines[-1])]
    for sentence in reversed([each for each in sentences if each and not COURTESY.match(each)]):
        before, _, clause = sentence.partition(", which ")
        if found := (clause and not DENIED.search(clause) and _asked(before, question)) or _said(sentence):
            return found
        if re.search(r"\d", sentence):
            return None
    return None


def _said(sentence: str) -> str | None:
    """Return the value at the end of a sentence: of its equation, or after its verb."""
    if HEDGES.search(sentence) or DENIED.search(sentence):
        return None
    if first := FIRST.match(sentence):
        return _clean(first["value"])
    sentence = sentence.rstrip("!")  # of prose: a factorial is written as a formula
    if EQUALS.search(sentence) and (found := _chain(sentence)):
        return found
    for match in reversed(list(VERB.finditer(sentence))):
        if found := _value(sentence[match.end() :].strip(" *:")):
            return found
    return None


def _asked(text: str, question: str) -> str | None:
    """Return the last value that the response gives to a formula of the question: "61 - 48 is 13. Subtraction ..."."""
    for match in reversed(list(EQUATION.finditer(text))):
        denied = DENIED.search(text[match.end() :].partition("\n")[0].partition(". ")[0])
        if not denied and stands_in(match["formula"], question):
            return _clean(match["value"].rstrip(",."))
    return None


def _chain(sentence: str) -> str | None:
    """Return the last member of the equation at the end of a sentence, or all values of a list of equations."""
    if several := LIST.search(sentence):
        return _clean(several[0])
    maths = [next(filter(None, groups)) for groups in MATHS.findall(sentence)]
    if maths and EQUALS.search(maths[-1]):
        return _clean(maths[-1])
    last = EQUALS.split(sentence)[-1].strip(" *$()")
    return _value(last)


def _sentence(text: str) -> str:
    """Return the text up to the end of the sentence, ignoring full stops inside mathematics; "" for a question."""
    math = MATHS.match(text)
    end = END.search(text, math.end() if math else 0)
    return text[: 0 if end[0] == "?" else end.start()] if end else text


def _value(text: str, *, stated: bool = False, bare: bool = False) -> str | None:
    """Return the text if it is a value: mathematics, a number with its unit, or, if it is stated, a few words."""
    if HEDGES.search(text):
        return None
    text = REMARK.sub("", re.split("[→⇒]", text)[-1].strip('*_`" \n\t')).strip()
    text = text.strip("'") if text[:1] == "'" else text
    if not text or len(text) > LONGEST or text[-1] in "+-*/=":
        return None
    if MATHS.match(text):
        rest = MATHS.sub("", text).strip(" .,")
        return _clean(text) if not rest or len(rest.split()) <= 4 else None
    number_of_words = len(WORD.findall(re.sub(r"\\[a-zA-Z]+\{?", "", text)))
    if VALUE.fullmatch(text):
        return _clean(text)
    if bare:
        return _clean(text) if number_of_words == 0 or (len(text.split()) <= 2 and not VERB.search(text)) else None
    if stated and (number_of_words <= 5 or is_number(text.split()[0])):
        return _clean(text)
    return _clean(text) if number_of_words == 0 else None


def _last(text: str) -> str | None:
    """Return the last formula or number."""
    maths = [(match.end(), next(filter(None, match.groups()))) for match in MATHS.finditer(text)]
    numbers = [(match.end(), match[0]) for match in LAST.finditer(text)]
    found = max([*maths[-1:], *numbers[-1:]], default=None)
    return _clean(found[1]) if found else None


def _clean(answer: str) -> str:
    """Remove outer dollar signs, emphasis and a final full stop."""
    answer = answer.strip().strip("*_`").strip()
    if len(answer) > 1 and answer[0] == answer[-1] == "$" and "$" not in answer[1:-1]:
        answer = answer[1:-1].strip()
    return answer.removesuffix(".").strip()


def compare_exactly(reference: str, answer: str) -> bool | None:
    """Compare two answers as texts. Returns None if only algebra can decide, as for "0.5" and "1/2"."""
    if reference == answer:
        return True
    if INTEGER.fullmatch(reference) and INTEGER.fullmatch(answer):
        return int(reference.replace(",", "")) == int(answer.replace(",", ""))
    return None
