"""The verifiers of multiple choice and of format."""

import re

from megatron_rft.responses import Prompt, Score
from megatron_rft.rewards.answers import final_answer
from megatron_rft.rewards.base import Reward, verdict, with_thought, without_thoughts
from megatron_rft.rewards.tools.verifier import has_sections

TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
STATED = re.compile(
    r"(?:\b(?:answer|(?:correct|right|best|final|my) (?:option|choice))\b[*_]*(?:\s+(?:is|should be|must be|would be))?"
    r"(?:\s+(?:therefore|thus|hence|then|clearly|indeed|(?:most )?likely)\b)?"
    r"|\b(?:i choose|choose|it's|it is)\b|答案[是为]?|respuesta(?: correcta| final)?(?:\s+es)?\b)"
    r"\s*[:：=]?[*_\s]*(?:(?:option|choice)\b)?",
    re.IGNORECASE,
)
# Within tags or a box: what may precede the letter.
LEAD = re.compile(
    r"(?:\\text\w*\{)?(?:the\s+)?(?:(?:correct|right|best|final)\s+)?"
    rf"(?:{STATED.pattern}|(?:option|choice)\b)",
    re.IGNORECASE,
)
CONFIRMED = re.compile(r"\b([A-Z])[)*_$`\"'.]*\s+is\s+(?:the\s+)?(?:correct|right|best|answer)\b")
# A letter in brackets or emphasis, and what follows it on its line.
OPTION = re.compile(
    r"(?:[\s*_`\"'$({\[\\-]|text(?:bf)?\{|math(?:bf|rm)\{)*(?P<letter>[A-Z])(?![\w'’+#-])"
    r"(?P<marks>[)}\]*_`\"'$.:]*)(?P<rest>[^\n]*)"
)
# Another letter behind it: "A or B", "A, B", "A. B. C."; not the words A and I, and not "B is wrong".
ANOTHER = re.compile(
    r"(?![\s,]*\(?[A-Z]\)? is (?:wrong|incorrect|not)\b)"
    r"(?:(?:[,/&|(]|\b(?i:or|o|and|also|as well as|maybe|perhaps|possibly|otherwise|else|unless|except|if)\b)"
    r"\s*(?:(?i:option)\s*)?|\\text\b|[\s{}])*\(?(?![AI]\s+[a-z])[A-Z]"
    r"(?=[\s.,:;)/*$}\]]|\Z)(?!\s*[=<>+])"
)
# Within tags or a box: another option behind "A. text", and any other letter behind a bare A, but the words A and I.
LISTED = re.compile(
    r"(?:^|;)[\s*(]*[A-Z](?:[.:)*]|\s*$)|[\s,]\(?[A-Z][:)]|\b(?i:option|answer is)\s+\(?[A-Z]\b", re.MULTILINE
)
OTHER = re.compile(r"(?<!\d)[\s;,:|/=→–—-][({*$]*(?![AI]\s+[a-z])[A-J](?=[\s.,;:!?)\]}*$]|\Z)")
DENIED = re.compile(r"[\s,(]*(?:(?:is|can)\s*)?(?:not|n't|wrong|incorrect|false)\b")
SMALL = re.compile(r"\A(\W*(?:text\w*\W+)?)([a-j])(?=\W*\Z)")  # alone within tags or a box
A_WORD = re.compile(r"\s+(?!(?:because|since|as|is|so|but|which)\b)[a-z]")  # "A cat", "I think"
TAIL = 2000  # characters at the end in which an answer is looked for


def chosen(text: str) -> str | None:
    """Return the last letter in <answer> tags, in a box, stated as the answer, or with which the last line begins. None
    if several letters are named there."""
    text = without_thoughts(text)[-TAIL:]
    if "<answer>" in text:
        found, rest = TAGGED.findall(text), text.rpartition("</answer>")[2]
        return _marked(found[-1]) if found and not rest.strip(" \t\r\n.`") else None
    if "\\boxed" in text:
        return _marked(final_answer(text, "boxed") or "")
    for match in reversed(list(STATED.finditer(text))):
        if letter := option(text[match.end() :]):
            return letter
    if confirmed := CONFIRMED.findall(text):
        return confirmed[-1]
    return option(text.strip().rpartition("\n")[2], alone=True)


def _marked(text: str) -> str | None:
    """Return the option within tags or a box: "B", "B. Paris", "Option B", "The answer is B"; None if it names several
    or says that it is wrong. A bare letter may stand beside no other; after "B." follows the option's own text."""
    text = SMALL.sub(lambda small: small[1] + small[2].upper(), BOXED.sub(r"\1", text).strip())
    lead = LEAD.match(text)
    text = text[lead.end() :] if lead else text
    letter, found = option(text), OPTION.match(text)
    if letter is None:
        return None
    rest = text[found.end("marks") :]
    several = (LISTED if set(found["marks"]) & set(".:)") else OTHER).search(rest)
    return None if several or DENIED.match(rest) else letter


def option(text: str, *, alone: bool = False) -> str | None:
    """Return the letter of the option with which a text begins: "(B)", "**B**", "B. Paris"; None if it names several.
    `alone`: nothing says that an answer follows, so that a bare letter must be the whole text."""
    found = OPTION.match(text)
    if found is None or ANOTHER.match(found["rest"]):
        return None
    if not found["marks"] and (found["letter"] in "AI" and A_WORD.match(found["rest"]) or (alone and found["rest"])):
        return None
    return found["letter"]


class ChoiceReward(Reward):
    """Gives 1 for the letter of the reference, else 0."""

    maximum = 1.0

    def __call__(self, prompts: list[Prompt], texts: list[str]) -> list[Score]:
        return [self._score(p.answer, self.answer(p, text)) for p, text in zip(prompts, texts, strict=True)]

    def _score(self, reference: str, choice: str | None) -> Score:
        wanted = chosen(f"answer: {reference.strip()}") if len(reference.strip()) > 1 else reference.strip().upper()
        if not wanted or not re.fullmatch("[A-Z]", wanted):  # such as the number of an option
            return Score(0.0, error=f"the reference {reference[:80]!r} names no option")
        wrong = f"{choice} is wrong" if choice else "no option is chosen"
        return verdict(choice == wanted, "correct" if choice == wanted else wrong)

    def answer(self, prompt: Prompt, text: str) -> str | None:
        return chosen(with_thought(prompt, text))


class FormatReward(Reward):
    """Gives 1 if the response consists of the sections <tag>...</tag>, each once and in this order, else 0."""

    maximum = 1.0

    def __init__(self, tags: list[str]):
        self.tags = tags

    def __call__(self, prompts: list[Prompt], texts: list[str]) -> list[Score]:
        wanted = " ".join(f"<{tag}>...</{tag}>" for tag in self.tags)
        right, wrong = Score(1.0, "format followed"), Score(0.0, f"the format is not {wanted}")
        return [right if has_sections(each, self.tags) else wrong for each in map(with_thought, prompts, texts)]
