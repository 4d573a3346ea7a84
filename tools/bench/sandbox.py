"""Measures small programs per second in the sandbox by kind of test and number of workers, against a fresh interpreter
for each.

    python tools/bench/sandbox.py --programs 400 --workers 1 2

A program is of a few lines, as of a first problem of a course; each is different, so that none is graded by memory.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from megatron_rft.records import Prompt
from megatron_rft.rewards.code import CodeReward, container

SMALLEST = "--programs 8 --workers 1"  # tests/bench
FUNCTION = "def f(n):\n    total = 0\n    for i in range(n + 1):\n        total += i * i\n    return total\n"
SCRIPT = f"{FUNCTION}print(f(int(input())))\n"
SUMS = {2: 5, 3: 14, 10: 385, 20: 2870, 30: 9455}
INPUTS, OUTPUTS = [f"{n}\n" for n in SUMS], [f"{total}\n" for total in SUMS.values()]
KINDS = {
    "script, 1 input": (SCRIPT, {"kind": "stdin", "inputs": INPUTS[:1], "outputs": OUTPUTS[:1]}),
    "script, 5 inputs": (SCRIPT, {"kind": "stdin", "inputs": INPUTS, "outputs": OUTPUTS}),
    "5 calls": (FUNCTION, {"kind": "call", "name": "f", "inputs": [[n] for n in SUMS], "outputs": [*SUMS.values()]}),
    "5 asserts": (FUNCTION, {"kind": "assert", "code": "\n".join(f"assert f({n}) == {t}" for n, t in SUMS.items())}),
}


def in_the_sandbox(kind: str, programs: int, workers: int) -> float:
    """Return programs per second, including all of their tests."""
    source, tests = KINDS[kind]
    reward = CodeReward(timeout_s=10.0, workers=workers)
    prompts = [Prompt(0, (1,), "", json.dumps(tests))] * programs
    reward(prompts[:workers], [f"{source}# warm {i}" for i in range(workers)])  # servers start at their first program
    start = time.perf_counter()
    scores = reward(prompts, [f"{source}# {i}" for i in range(programs)])
    seconds = time.perf_counter() - start
    reward.close()
    assert all(score.reward == 1.0 for score in scores), scores[0]
    return programs / seconds


def fresh_interpreters(programs: int, workers: int) -> float:
    """Measure the same script with one input in a new interpreter each time."""
    command = [os.path.realpath(sys._base_executable), "-I", "-S", "-c", SCRIPT]

    def run(_) -> None:
        subprocess.run(command, input=INPUTS[0], text=True, check=True, stdout=subprocess.DEVNULL)

    start = time.perf_counter()
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(run, range(programs)))
    return programs / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    print(f"{container()}\n")
    print("| programs per second | " + " | ".join(f"{w} workers" for w in args.workers) + " |")
    print("|---" * (1 + len(args.workers)) + "|")
    for kind in KINDS:
        rates = [in_the_sandbox(kind, args.programs, workers) for workers in args.workers]
        print(f"| {kind} | " + " | ".join(f"{rate:.0f}" for rate in rates) + " |", flush=True)
    rates = [fresh_interpreters(args.programs // 4, workers) for workers in args.workers]
    print("| script, 1 input, fresh interpreter | " + " | ".join(f"{rate:.0f}" for rate in rates) + " |", flush=True)


if __name__ == "__main__":
    main()
