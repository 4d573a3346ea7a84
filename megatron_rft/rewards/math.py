"""The mathematics verifier gives 1 if the final answer is equivalent to the reference, else 0.

`answers.py` finds the answer, `equivalence` has what compares it. A verdict takes at most trees.LIMIT_S. An answer on
which it fails is wrong; a reference on which it fails is an error.
"""

import re

from megatron_rft.responses import Prompt, Score
from megatron_rft.rewards.answers import final_answer
from megatron_rft.rewards.base import Reward, verdict, with_thought
from megatron_rft.rewards.choice import option
from megatron_rft.rewards.equivalence.compare import ASKS_PERCENT, counted, is_quantity, members, parameters, same
from megatron_rft.rewards.equivalence.disguise import disguised
from megatron_rft.rewards.equivalence.reader import SEPARATORS, read
from megatron_rft.rewards.equivalence.tokens import tokens
from megatron_rft.rewards.equivalence.trees import DEGREE, is_number, is_numeral, nodes, time_limit, value, value_of

LONGEST = 1000  # characters of an answer that may be right, or four times its reference: 10^6 digits are not compared
LONGEST_QUESTION = 8000  # last characters of a problem that are read
WHOLE = re.compile(rf"[-+]?\d{{1,{LONGEST}}}", re.ASCII)


class MathReward(Reward):
    """`answer`: where an answer is read (answers.py)."""

    maximum = 1.0

    def __init__(self, answer: str = "marked"):
        self.how = answer

    def __call__(self, prompts: list[Prompt], texts: list[str]) -> list[Score]:
        return [self._score(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]

    @time_limit()
    def answer(self, prompt: Prompt, text: str) -> str | None:
        """Return the response's answer, in the same form for equal answers; None if it cannot be read in time."""
        try:
            found = final_answer(with_thought(prompt, text), self.how, problem(prompt))
            return None if found is None or len(found) > LONGEST else vote(found)
        except Exception:  # as in a verdict: a fault of the reader must not end an evaluation
            return None

    @time_limit()
    def _score(self, prompt: Prompt, text: str) -> Score:
        """Grade a response. If the grader fails on its answer and grades another one, the answer is at fault and wrong:
        as an error it would be a way out of training. Half of the time is left to find that out."""
        reference, asked = reference_form(prompt.answer), problem(prompt)
        try:
            with time_limit(1 / 2):
                return self._graded(reference, with_thought(prompt, text), asked)
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"
        try:
            judge(reference, "0", asked)
        except Exception as error:
            return Score(0.0, error=f"the reference {reference[:80]!r}: {type(error).__name__}: {error}")
        return verdict(False, f"the answer cannot be graded: {fault}")

    def _graded(self, reference: str, text: str, asked: str) -> Score:
        answer = final_answer(text, self.how, asked)
        if answer is None:
            return verdict(False, "the response marks no answer")
        if len(answer) > max(LONGEST, 4 * len(reference)):
            return verdict(False, f"an answer of {len(answer)} characters")
        right = judge(reference, answer, asked)
        return verdict(right, "correct" if right else "wrong answer")


def reference_form(reference: str) -> str:
    """Return the answer of a worked reference: its last box or the text after "####"."""
    return (final_answer(reference) if "boxed" in reference or "####" in reference else None) or reference.strip()


def problem(prompt: Prompt) -> str:
    return (prompt.question or prompt.text)[-LONGEST_QUESTION:]


@time_limit()
def judge(reference: str, answer: str, question: str = "") -> bool:
    """Return whether `answer` is equivalent to `reference`, and not the `question` or a calculation in disguise."""
    if not reference.strip():
        raise ValueError("the reference answer is empty")
    if WHOLE.fullmatch(reference) and WHOLE.fullmatch(answer):  # nothing to read: most answers are such
        return int(reference) == int(answer)
    (ours, coin), (theirs, other) = tokens(reference), tokens(answer)
    ours, theirs = ([token.text for token in each] for each in (ours, theirs))
    if ours == theirs and ours and (coin == other or not coin or not other):
        return True
    letter = "".join(ours).strip("()")
    if len(letter) == 1 and letter.isupper() and (chosen := option(answer.strip(), alone=True)):
        others = [each for each in theirs if each not in ("(", ")", ".")][1:2]  # C or 5
        return chosen == letter and not set(others) & SEPARATORS
    trees = read(reference), read(answer)
    if None in trees:  # it is equal only to the same text
        one, other = (" ".join(each).lower().replace('"', "") for each in (ours, theirs))
        return one == other
    wanted, got = parameters(*trees)
    if is_number(wanted) and DEGREE not in nodes(wanted) and not all(map(is_quantity, members(value_of(got)))):
        return False  # a formula would be one in disguise, whatever its value
    right = same(wanted, got, bool(ASKS_PERCENT.search(question)))
    return right and not disguised(wanted, counted(wanted, got), question)


def vote(answer: str) -> str:
    """Return the same text for equal answers, for majority votes: "x = 1,234 apples" -> "1234", "2/4" -> "1/2"."""
    tree = read(answer)
    trees = [value_of(each) for each in members(tree)] if tree else []
    return ", ".join(str(value(each)) if is_numeral(each) else repr(each) for each in trees) or answer
