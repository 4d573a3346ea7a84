"""Hangs a small run in every phase, in every way and layout, and checks that the right rank is named.

    PYTHONPATH=. python tools/hang_test.py [--only TEXT]

A line for each case; the exit status is 1 where a case failed. A case takes about half a minute.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.integration.test_hangs import check, hang

PHASES = ("generation", "reward", "logprobs", "training", "sync", "evaluation", "checkpoint")
CASES = [
    *((layout, 1, phase, "stop") for layout in ("tp", "pp", "dp") for phase in PHASES),
    *((layout, 0, phase, "loop") for layout in ("tp", "pp", "dp") for phase in ("logprobs", "training", "checkpoint")),
    *(("dp", 1, phase, "loop") for phase in ("generation", "sync", "evaluation")),
    *((layout, 1, phase, "other") for layout in ("tp", "pp", "dp") for phase in ("logprobs", "sync")),
    *(("dp", rank, "generation", "engine") for rank in (0, 1)),
    ("dp", 1, "reward", "grader"),
    *(("one", 0, phase, kind) for phase in ("generation", "training", "checkpoint") for kind in ("stop", "loop")),
]


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--only", default="", help="cases whose name has this text")
    only, failed, done = arguments.parse_args().only, 0, 0
    for case in CASES:
        name, begin = " ".join(map(str, case)), time.monotonic()
        if only not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            layout, rank, phase, kind = case
            status, output = hang(Path(folder), layout, rank, phase, kind)
            told = next((line for line in output.splitlines() if "the run hangs" in line), output[-300:])
            try:
                check(Path(folder), layout, rank, phase, kind, status, output)
                verdict = "ok"
            except (AssertionError, StopIteration):
                verdict, failed = "WRONG", failed + 1
        done += 1
        told = told.removeprefix("error: the run hangs: ").partition(". /tmp")[0]
        print(f"{verdict:5} {name:28} {time.monotonic() - begin:4.0f} s  {told}", flush=True)
    print(f"{done - failed} of {done} cases named the right rank")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
