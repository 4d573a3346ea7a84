"""The verifiers of multiple choice and of format."""

import re

from megatron_rft.records import Prompt, Score
from megatron_rft.rewards.base import Reward
from megatron_rft.rewards.tools.rlla import has_sections

LETTER = r"\(?\s*([A-Z])\s*\)?"
TAGGED = re.compile(rf"<answer>\s*{LETTER}[.:]?\s*</answer>")
BOXED = re.compile(rf"\\boxed\{{\s*(?:\\text\{{)?{LETTER}\}}?\s*\}}")
STATED = re.compile(rf"(?i:answer|option|choice)\s*(?i:is|:)?\s*:?\s*\**{LETTER}\**(?![\w'])")
ALONE = re.compile(rf"\**{LETTER}\**[.)]?")
TAIL = 2000  # characters at the end in which an answer is looked for


def chosen(text: str) -> str | None:
    """Return the last letter in <answer> tags, in a box, stated as the answer, or alone on the last line."""
    text = text[-TAIL:]
    if "<answer>" in text:
        found = TAGGED.findall(text)
        return found[-1] if found and text.rstrip().endswith("</answer>") else None
    for pattern in (BOXED, STATED):
        found = pattern.findall(text)
        if found:
            return found[-1]
    alone = ALONE.fullmatch(text.strip().rpartition("\n")[2].strip())
    return alone[1] if alone else None


class ChoiceReward(Reward):
    """Gives 1 for the letter of the reference, else 0."""

    maximum = 1.0

    def __call__(self, prompts: list[Prompt], texts: list[str]) -> list[Score]:
        return [self._score(prompt.answer, chosen(text)) for prompt, text in zip(prompts, texts, strict=True)]

    def _score(self, reference: str, choice: str | None) -> Score:
        wanted = chosen(f"answer: {reference.strip()}") if len(reference.strip()) > 1 else reference.strip().upper()
        if not wanted:
            return Score(0.0, error=f"the reference {reference[:80]!r} names no option")
        if choice is None:
            return Score(0.0, "no option is chosen")
        return Score(float(choice == wanted), "correct" if choice == wanted else f"{choice} is wrong")

    def answer(self, prompt: Prompt, text: str) -> str | None:
        return chosen(text)


class FormatReward(Reward):
    """Gives 1 if the response consists of the sections <tag>...</tag>, each once and in this order, else 0."""

    maximum = 1.0

    def __init__(self, tags: list[str]):
        self.tags = tags

    def __call__(self, prompts: list[Prompt], texts: list[str]) -> list[Score]:
        wanted = " ".join(f"<{tag}>...</{tag}>" for tag in self.tags)
        right, wrong = Score(1.0, "format followed"), Score(0.0, f"the format is not {wanted}")
        return [right if has_sections(text, self.tags) else wrong for text in texts]
