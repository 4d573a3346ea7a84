r"""Mathematics: a problem, a reference answer, usually a worked solution.

Answers come as text, integers and floats (AMC: 27.0), as lists (OlympiadBench), after "####" (GSM8K) or in the last
\boxed of a solution (MATH). Prompt suffixes that a publisher appended to the problem are removed: the template adds
its own.
"""

import re
from typing import Any

from megatron_rft.data.fields import Fields, Row, as_row, check_scalar

BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*(?=\{)|\\boxed\s+(?P<bare>[^\s$]+)")
SUFFIXES = (
    "Let's think step by step and output the final answer within \\boxed{}.",
    "Please reason step by step, and put your final answer within \\boxed{}.",
    'Let\'s think step by step and output the final answer after "####".',
)
PROBLEM = ("problem", "question", "prompt")
ANSWER = ("answer", "expected_answer", "final_answer", "ground_truth")
RAN_ON = re.compile(r"(?<=\W)solution:\s*$", re.IGNORECASE)  # a Gaokao answer that the next heading ran into


def gsm8k(fields: Fields) -> Row:
    """The worked answer ends with "#### 18"; <<48/2=24>> are its calculator's marks."""
    worked = fields.text("answer")
    _, mark, answer = worked.rpartition("####")
    if not mark:
        raise fields.wrong(f"answer does not end with '#### NUMBER': {worked[-40:]!r}")
    return as_row(_problem(fields), answer.strip(), solution=re.sub(r"<<.*?>>", "", worked))


def problem(fields: Fields) -> Row:
    """MATH, MATH-500, AIME, AMC, Minerva, GaoKao and OlympiadBench. As verl prepares MATH, reward_model has the answer,
    and `solution` has it too."""
    answer, solution, context = _answer(fields), fields.maybe("solution"), fields.maybe("context")
    if not isinstance(solution, str | None):
        solution = "\n\n".join(fields.items("solution"))
    return as_row(
        f"{context}\n\n{_problem(fields)}" if context else _problem(fields),
        answer,
        solution=None if solution and solution.strip() == answer else solution,
        subject=fields.maybe("subject", "type", "subfield"),
        level=str(fields.maybe("level") or "").removeprefix("Level "),
        id=fields.maybe("unique_id", "problem_id", "id", "ID", "idx", "source"),
    )


def answer_text(value: Any) -> str:
    """27.0 -> "27"; a list's values joined by commas."""
    if isinstance(value, list | tuple):
        return ", ".join(answer_text(each) for each in value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    check_scalar(value)
    return str(value).strip()


def last_box(text: str) -> str | None:
    r"""The content of the last \boxed{...}, braces in balance; None where there is none."""
    boxes = [match["bare"] or _braced(text[match.end() :]) for match in BOX.finditer(text)]
    return next((box for box in reversed(boxes) if box is not None), None)


def _braced(text: str) -> str | None:
    depth = 0
    for place, letter in enumerate(text):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if depth == 0:
            return text[1:place]
    return None


def _problem(fields: Fields) -> str:
    problem = fields.text(*PROBLEM).strip()
    for suffix in SUFFIXES:
        problem = problem.removesuffix(suffix).rstrip()
    return problem


def _answer(fields: Fields) -> str:
    answer = fields.maybe(*ANSWER)
    if fields.has("reward_model"):
        answer = fields.object("reward_model").get("ground_truth")
    elif answer is None and fields.has("solution"):
        answer = last_box(fields.text("solution"))
        if answer is None:
            raise fields.wrong(f"no answer, and no \\boxed in the solution: {fields.text('solution')[-60:]!r}")
    return RAN_ON.sub("", answer_text(fields.get(*ANSWER) if answer is None else answer))
