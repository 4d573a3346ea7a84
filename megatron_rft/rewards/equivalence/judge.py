"""The verdict on an answer: its value (compare.py), and whether it is the question in disguise (disguise.py)."""

from megatron_rft.rewards.choice import option
from megatron_rft.rewards.equivalence import values
from megatron_rft.rewards.equivalence.compare import ASKS_PERCENT, counted, members, parameters, same
from megatron_rft.rewards.equivalence.disguise import disguised, is_numeral, value_of
from megatron_rft.rewards.equivalence.reader import SEPARATORS, Unread, is_word, read
from megatron_rft.rewards.equivalence.tokens import tokens
from megatron_rft.rewards.equivalence.values import TookTooLong, time_limit


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
    letter = "".join(ours).strip("()")
    if len(letter) == 1 and letter.isupper() and (chosen := option(answer.strip(), alone=True)):
        others = [each for each in theirs if each not in ("(", ")", ".")][1:2]  # C or 5
        return chosen == letter and not set(others) & SEPARATORS
    try:
        wanted, got = parameters(read(reference), read(answer))
    except Unread:  # it is equal only to the same text
        return _plain(ours) == _plain(theirs)
    right = same(wanted, got, bool(ASKS_PERCENT.search(question)))
    return right and not disguised(wanted, counted(wanted, got), question)


@time_limit()
def vote(answer: str) -> str:
    """Return the same text for equal answers, for majority votes: "x = 1,234 apples" -> "1234", "2/4" -> "1/2"."""
    try:
        trees = [value_of(each) for each in members(read(answer))]
        return ", ".join(str(values.value(each)) if is_numeral(each) else repr(each) for each in trees)
    except (Unread, TookTooLong):
        return answer


def _plain(found: list[str]) -> str:
    """Words in one case, without spaces: \\text{June 20} is June 20."""
    text = " ".join(found)
    return text.lower().replace(" ", "").replace('"', "") if any(map(is_word, found)) else text
