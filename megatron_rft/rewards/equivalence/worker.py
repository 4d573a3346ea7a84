"""The grading process: `structure.equivalent` behind a pipe, one JSON line in, one out.

The time limit is the kernel's: alarms whose default action ends the process, whatever sympy is doing, and also when the
trainer that asked is gone. Whoever reads the pipe sees it close and starts another. It is a limit of processor time, so
that a busy machine gives the same scores; by the clock it is PATIENCE times as long.
"""

import json
import logging
import resource
import signal
import sys

PATIENCE = 4
MEMORY = 4 << 30  # bytes of address space: 9^(9^9) is a MemoryError, not a machine without memory


class UnreadableReference(ValueError):
    """The reference answer holds nothing that can be compared with."""


def judge(reference: str, answer: str, question: str = "") -> bool:
    """Whether `answer` is equivalent to `reference`. `question` says whether a percentage is asked for."""
    from megatron_rft.rewards.equivalence.algebra import Unreadable
    from megatron_rft.rewards.equivalence.structure import equivalent

    if not reference.strip():
        raise UnreadableReference("the reference answer is empty")
    try:
        return equivalent(reference, answer, question)
    except Unreadable:  # a reference that is no formula: only its own text is equal to it
        return False


def limit(seconds: float) -> None:
    """0: none."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE * seconds)


def main(timeout_s: float) -> None:
    logging.disable(logging.CRITICAL)
    judge(r"\frac{x}{2}", r"0.5x")  # loading takes a second: not out of the first question's time
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
