"""The mathematics verifier gives 1 if the final answer is equivalent to the reference, else 0.

`answers.py` finds the answer, `equivalence` compares it. Reading and evaluating are
bounded (reader.MOST, values.MOST), and a verdict takes at most values.LIMIT_S. An answer on which it fails is wrong; a
reference on which it fails is an error.
"""

from megatron_rft.records import Score
from megatron_rft.rewards.answers import final_answer
from megatron_rft.rewards.base import Reward, Row
from megatron_rft.rewards.equivalence.judge import judge, vote

LONGEST = 1000  # characters of an answer that may be right, or four times its reference: 10^6 digits are not compared
LONGEST_QUESTION = 8000  # last characters of a problem that are read
RIGHT, WRONG = Score(1.0, "correct"), Score(0.0, "wrong answer")


class MathReward(Reward):
    """`answer`: where an answer is read (answers.py)."""

    maximum = 1.0

    def __init__(self, answer: str = "marked"):
        self.how = answer

    def __call__(self, prompts: list[Row], texts: list[str]) -> list[Score]:
        assert len(prompts) == len(texts), f"{len(prompts)} prompts, {len(texts)} texts"
        asked = [self._read(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
        # Equal answers are graded once: a group's responses often end in the same one.
        scores = {each: graded(*each) for each in dict.fromkeys(each for each in asked if isinstance(each, tuple))}
        return [scores[each] if isinstance(each, tuple) else each for each in asked]

    def answer(self, prompt: Row, text: str) -> str | None:
        """Return the response's answer, in the same form for equal answers."""
        found = final_answer(text, self.how, problem(prompt))
        return None if found is None or len(found) > LONGEST else vote(found)

    def _read(self, prompt: Row, text: str) -> Score | tuple[str, str, str]:
        """Return (reference, answer, problem), or the score of a response without an answer."""
        reference, asked = reference_form(prompt.answer), problem(prompt)
        answer = final_answer(text, self.how, asked)
        if answer is None:
            return Score(0.0, "the response marks no answer")
        if len(answer) > max(LONGEST, 4 * len(reference)):
            return Score(0.0, f"an answer of {len(answer)} characters")
        return reference, answer, asked


def graded(reference: str, answer: str, asked: str) -> Score:
    """Compare an answer. If the grader fails on it and grades another one, the answer is at fault and wrong: as an
    error it would be a way out of training."""
    try:
        return RIGHT if judge(reference, answer, asked) else WRONG
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    try:
        judge(reference, "0", asked)
    except Exception as error:
        return Score(0.0, error=f"the reference {reference[:80]!r}: {type(error).__name__}: {error}")
    return Score(0.0, f"the answer cannot be graded: {problem}")


def reference_form(reference: str) -> str:
    """Return the answer of a worked reference: its last box or the text after "####"."""
    marked = final_answer(reference) if "boxed" in reference or "####" in reference else None
    return marked or reference.strip()


def problem(prompt: Row) -> str:
    return (prompt.question or prompt.text)[-LONGEST_QUESTION:]
