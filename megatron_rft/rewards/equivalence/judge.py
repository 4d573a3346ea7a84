"""The verdict on an answer: its value (compare.py), and whether it is the question in disguise (disguise.py)."""

import re

from megatron_rft.rewards.equivalence.compare import ASKS_PERCENT, counted, parameters, same
from megatron_rft.rewards.equivalence.disguise import disguised, has_another_kind, is_number, value_of
from megatron_rft.rewards.equivalence.reader import Unread, read
from megatron_rft.rewards.equivalence.tokens import tokens
from megatron_rft.rewards.equivalence.values import TookTooLong, time_limit

LETTER = re.compile(r"\(?\s*(?:\\text\w*\{)?\s*\(?([A-Z])\)?\s*\}?\s*\)?")
# After the first letter, a second choice: (A) (B), A. B., A: B:, A) or (B); not (A) X = 3.
SECOND_LETTER = re.compile(r"[\s).:;}\\]*(?:\\text\w*\{)?\s*(?:,|(?:or|and|unless|if)\b|\(?[A-Z]\s*[).:])")


class UnreadableReference(ValueError):
    """The reference answer has nothing to compare with."""


@time_limit()
def judge(reference: str, answer: str, question: str = "") -> bool:
    """Return whether `answer` is equivalent to `reference`, and not the `question` or a calculation in disguise."""
    if not reference.strip():
        raise UnreadableReference("the reference answer is empty")
    ours, theirs = ([each.text for each in tokens(text)[0]] for text in (reference, answer))
    if ours == theirs and ours:
        return True
    if found := LETTER.fullmatch(reference.strip()):
        letter = re.match(r"\(?(?:\\text\w*\{)?\s*\(?([A-Z])(?:\)|\.|:|\s*\}|$)", answer.strip())
        if letter:
            return letter[1] == found[1] and not SECOND_LETTER.match(answer.strip(), letter.end(1))
    try:
        wanted, got = parameters(read(reference), read(answer))
    except Unread:  # it is equal only to the same text
        return _plain(ours) == _plain(theirs)
    right = same(wanted, got, bool(ASKS_PERCENT.search(question)))
    return right and not disguised(wanted, counted(wanted, got), question)


@time_limit()
def is_calculation(reference: str, answer: str, question: str) -> bool:
    """Whether an answer, right or wrong, is a calculation where a number is asked for: 57 + 87."""
    try:
        goal, tree = value_of(read(reference)), value_of(read(answer))
    except (Unread, TookTooLong):
        return False
    return is_number(goal) and has_another_kind(goal, tree, question)


def _plain(found: list[str]) -> str:
    """Words in one case, without punctuation: \\text{June 20} is June 20."""
    text = " ".join(found)
    return re.sub(r"[\s\"{}]", "", text.lower()) if '"' in text or re.search("[a-z]{3}", text) else text
