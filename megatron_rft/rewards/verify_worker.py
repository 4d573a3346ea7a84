"""The grading process: math-verify behind a pipe, one JSON line in, one out. Run as a file, so it never imports torch.

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
SMALL = 1e-3
MEMORY = 4 << 30  # bytes of address space: 9^(9^9) is a MemoryError, not a machine without memory


class UnreadableReference(ValueError):
    """The reference answer holds nothing that can be compared with."""


def judge(reference: str, answer: str) -> bool:
    """Whether `answer` (LaTeX in a box, or a whole response) is equivalent to `reference` (in a box)."""
    from math_verify import parse, verify

    gold = parse(reference, parsing_timeout=None)
    if not gold:
        raise UnreadableReference(f"the reference answer cannot be read: {reference[:80]}")
    found = parse(answer, parsing_timeout=None)
    return verify(gold, found, timeout_seconds=None) and not _small_and_different(gold, found)


def _small_and_different(gold: list, found: list) -> bool:
    """math-verify compares six decimals, in which 1.6e-19 is 1.6e-18: small numbers are to agree in three digits."""
    numbers = [each[0] for each in (gold, found) if getattr(each[0], "is_number", False)]
    try:
        a, b = map(float, numbers)
    except (TypeError, ValueError, OverflowError):  # not both are real numbers that floats hold
        return False
    largest = max(abs(a), abs(b))
    return largest < SMALL and abs(a - b) > 1e-3 * largest


def limit(seconds: float) -> None:
    """0: none."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE * seconds)


def main(timeout_s: float) -> None:
    logging.disable(logging.CRITICAL)
    judge("\\boxed{\\frac{1}{2}}", "\\boxed{0.5}")  # loading takes a second: not out of the first question's time
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
