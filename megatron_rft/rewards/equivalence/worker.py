"""The grading process: `structure.equivalent` behind a pipe, one JSON line in, one out.

The kernel enforces the time limit: the default action of its alarms ends the process, whatever sympy is doing, and even
if the trainer has ended. The trainer then sees the pipe close and starts another process. The limit is CPU time, so
that a busy machine gives the same scores; the limit in wall time is WALL_FACTOR times as long.
"""

import json
import logging
import resource
import signal
import sys

WALL_FACTOR = 4
MEMORY = 4 << 30  # bytes of address space, so that 9^(9^9) is a MemoryError and does not use up the machine's memory


class UnreadableReference(ValueError):
    """The reference answer has nothing to compare with."""


def judge(reference: str, answer: str, question: str = "", *repeated: str) -> bool:
    """Return whether `answer` is equivalent to `reference`. `question` shows whether a percentage is asked for.

    `repeated` are the question's formulas inside the answer. If one of them is the reference's value, the answer is
    wrong: (57 + 87)^1 only repeats 57 + 87.
    """
    from megatron_rft.rewards.equivalence.algebra import Unreadable, equal
    from megatron_rft.rewards.equivalence.latex import one_spelling
    from megatron_rft.rewards.equivalence.structure import equivalent

    if not reference.strip():
        raise UnreadableReference("the reference answer is empty")
    try:
        if not equivalent(reference, answer, question):
            return False
    except Unreadable:  # a reference that is not a formula equals only the same text
        return False
    try:
        return not any(equal(one_spelling(reference), formula) for formula in repeated)
    except Unreadable:
        return True


def limit(seconds: float) -> None:
    """Set the time limit; 0 removes it."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, WALL_FACTOR * seconds)


def main(timeout_s: float) -> None:
    logging.disable(logging.CRITICAL)
    judge(r"\frac{x}{2}", r"0.5x")  # loads sympy, which takes a second, before the first limit
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for number in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(number, signal.SIG_DFL)
    for line in sys.stdin:
        limit(timeout_s)
        try:
            result = {"correct": judge(*json.loads(line))}
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        limit(0)
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]))
