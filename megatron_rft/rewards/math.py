"""The mathematics verifier gives 1 if the final answer is equivalent to the reference, else 0.

`answers.py` finds the answer, `equivalence` compares it. Reading and evaluating are bounded (reader.MOST), and a verdict
takes at most values.LIMIT_S. An answer on which it fails is wrong; a reference on which it fails is an error.
"""

from megatron_rft.records import Score
from megatron_rft.rewards.answers import final_answer
from megatron_rft.rewards.base import Reward, Row
from megatron_rft.rewards.equivalence.judge import judge, vote
from megatron_rft.rewards.equivalence.values import time_limit

LONGEST = 1000  # characters of an answer that may be right, or four times its reference: 10^6 digits are not compared
LONGEST_QUESTION = 8000  # last characters of a problem that are read


class MathReward(Reward):
    """`answer`: where an answer is read (answers.py)."""

    maximum = 1.0

    def __init__(self, answer: str = "marked"):
        self.how = answer

    def __call__(self, prompts: list[Row], texts: list[str]) -> list[Score]:
        assert len(prompts) == len(texts), f"{len(prompts)} prompts, {len(texts)} texts"
        return [self._score(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]

    @time_limit()
    def answer(self, prompt: Row, text: str) -> str | None:
        """Return the response's answer, in the same form for equal answers."""
        found = final_answer(text, self.how, problem(prompt))
        return None if found is None or len(found) > LONGEST else vote(found)

    @time_limit()
    def _score(self, prompt: Row, text: str) -> Score:
        """Grade a response. If the grader fails on its answer and grades another one, the answer is at fault and wrong:
        as an error it would be a way out of training. Half of the time is left to find that out."""
        reference, asked = reference_form(prompt.answer), problem(prompt)
        try:
            with time_limit(1 / 2):
                return self._graded(reference, text, asked)
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"
        try:
            judge(reference, "0", asked)
        except Exception as error:
            return Score(0.0, error=f"the reference {reference[:80]!r}: {type(error).__name__}: {error}")
        return Score(0.0, f"the answer cannot be graded: {fault}")

    def _graded(self, reference: str, text: str, asked: str) -> Score:
        answer = final_answer(text, self.how, asked)
        if answer is None:
            return Score(0.0, "the response marks no answer")
        if len(answer) > max(LONGEST, 4 * len(reference)):
            return Score(0.0, f"an answer of {len(answer)} characters")
        return Score(1.0, "correct") if judge(reference, answer, asked) else Score(0.0, "wrong answer")


def reference_form(reference: str) -> str:
    """Return the answer of a worked reference: its last box or the text after "####"."""
    marked = final_answer(reference) if "boxed" in reference or "####" in reference else None
    return marked or reference.strip()


def problem(prompt: Row) -> str:
    return (prompt.question or prompt.text)[-LONGEST_QUESTION:]
