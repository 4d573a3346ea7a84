"""The code verifier runs programs in a sandbox against the tests of their problem (dynamic_constraint.txt, Eq. 7, 8).

    -1.0                      the program does not compile
    -0.6                      it raises, exits with an error, is killed, or exceeds its time or memory, in any test
    -0.3 + 1.3 * p / (p + f)  p tests passed, f failed

A time-out counts as a runtime error, as in those data sets. The tests of a row are a table (or its JSON) in the field
`tests`, else the reference answer itself. Its `kind` is one of

    stdin    inputs, outputs: texts; the program reads standard input and writes standard output
    call     name, inputs (lists of arguments), outputs: the values of a function, or of a method of `class Solution`
    assert   code: Python with asserts, each of which is a test; setup: Python before it, which only the tests see;
             names: functions and classes that the tests take from the program, even if `setup` defines them too; names
             that nothing defines always come from the program

and any kind may have a `preamble`: Python that precedes the program (imports and helpers that its prompt shows).
"""

import ast
import json
import os
import re
import sys
import warnings
from collections.abc import Sequence
from itertools import islice
from typing import Any

from megatron_rft.responses import Prompt, Score
from megatron_rft.rewards.base import Reward, with_thought, without_thoughts
from megatron_rft.rewards.sandbox.launch import CALL_LATE, COMPILE_ERROR, SandboxError, Server, describe
from megatron_rft.rewards.sandbox.runner import Limits, ProgramResult, Sandbox, find_container, run_script, run_tests

NONE_PASSED = -0.3
TIERS = {"does not compile": -1.0, "runtime error": -0.6, "time-out": -0.6}
FIELDS = {"stdin": ("inputs", "outputs"), "call": ("name", "inputs", "outputs"), "assert": ("code",)}
TYPES = {"name": str, "code": str, "inputs": list, "outputs": list, "names": list}
PYTHON = ("python", "python3", "py", "py3")
# Possessive, and with a bound, because the time of a search may not grow with the square of the line's length.
OPENING = re.compile(r"^(?P<indent>[ \t>]*+).{0,1000}?(?P<fence>`{3,}+|~{3,}+)[ \t]*+(?P<language>[\w+#.-]*+)[^`\n]*+$")
MOST_ENDS = 20  # fences that are tried as the end of a block
MOST_PARSED = 200  # of all blocks; beyond, a block ends at its first fence
SHOWN = 400  # characters of an input or output in a reason


class CodeReward(Reward):
    """`timeout_s`, `row_timeout_s`: processor seconds of one test (an input of a script, a call of a function) and of
    all tests of a row; twice that by the clock."""

    maximum = 1.0

    def __init__(
        self,
        timeout_s: float = 5.0,
        memory_mb: int = 1024,
        workers: int = 2,
        without_container: bool = False,
        row_timeout_s: float = 60.0,
    ):
        self.limits = Limits(timeout_s, 2 * timeout_s, memory_mb, test_s=timeout_s)
        self.row_limits = Limits(row_timeout_s, 2 * row_timeout_s, memory_mb, test_s=timeout_s)
        self.sandbox = Sandbox(workers, without_container)
        if os.environ.get("RANK", "0") == "0":
            print(f"programs run in {describe(self.sandbox.contained)}", file=sys.stderr, flush=True)

    def __call__(self, prompts: list[Prompt], texts: list[str]) -> list[Score]:
        tests = [prompt.fields.get("tests", prompt.answer) for prompt in prompts]
        tests = [each if isinstance(each, str) else json.dumps(each) for each in tests]
        tables = {each: read_tests(each) for each in set(tests)}
        given = zip(map(with_thought, prompts, texts), tests, strict=True)
        jobs = [(extract_code(text, tested_names(tables[each])), each) for text, each in given]
        # A group's responses are sometimes the same program: it runs once.
        different = list(dict.fromkeys(jobs))
        results = self.sandbox.map(lambda server, job: self._grade(server, job[0], tables[job[1]]), different)
        scores = {
            job: Score(0.0, error=f"sandbox: {result}") if isinstance(result, SandboxError) else result
            for job, result in zip(different, results, strict=True)
        }
        return [scores[job] for job in jobs]

    def close(self) -> None:
        self.sandbox.close()

    def _grade(self, server: Server, source: str, table: dict[str, Any] | str) -> Score:
        if isinstance(table, str):
            return Score(0.0, error=table)
        if not source.strip():
            return _tier("does not compile", "the response has no program", [])
        source = f"{table['preamble']}\n{source}" if table.get("preamble") else source
        grade = _grade_script if table["kind"] == "stdin" else _grade_module
        return grade(server, source, table, self.limits, self.row_limits)


def container(allow_none: bool = False) -> str:
    """Return how programs are contained on this machine. Raises ConfigError as `find_container` does."""
    return describe(find_container(allow_none))


class Interpreter:
    """Runs one program at a time, each in its own cell. `timeout_s`: processor seconds; twice that by the clock."""

    def __init__(self, timeout_s: float = 5.0, memory_mb: int = 1024, without_container: bool = False):
        self.limits = Limits(timeout_s, 2 * timeout_s, memory_mb)
        self.sandbox = Sandbox(1, without_container)

    def __call__(self, source: str) -> str:
        """Return what the program prints, and the error that ended it."""
        (ran,) = self.sandbox.map(lambda server, job: run_script(server, job, "", self.limits), [source])
        if isinstance(ran, SandboxError):
            raise ran
        ended = f"no result {self.limits}" if ran.timeout else ran.errors.strip() if ran.status else ""
        ended = ended or (f"exit status {ran.status}" if ran.status else "")
        return f"{ran.output}error: {ended}" if ended else ran.output


def read_tests(text: str) -> dict[str, Any] | str:
    """Return a row's tests, or why they cannot be read: an error of the data, not of the program."""
    try:
        table = {name: each for name, each in json.loads(text).items() if each is not None}
        missing = [name for name in FIELDS[table["kind"]] if name not in table]
        wrong = [name for name, kind in TYPES.items() if not isinstance(table.get(name, kind()), kind)]
    except (AttributeError, ValueError, TypeError, KeyError) as error:
        return f"the tests of the row cannot be read: {error!r} in {text[:80]!r}"
    if missing:
        return f"the tests of the row lack {', '.join(missing)}"
    if wrong:
        return f"{wrong[0]} of the row's tests must be a {TYPES[wrong[0]].__name__}: {table[wrong[0]]!r:.80}"
    if "inputs" in table and (not table["inputs"] or len(table["inputs"]) != len(table["outputs"])):
        return f"the row has {len(table['inputs'])} inputs and {len(table['outputs'])} outputs"
    return table


def tested_names(table: dict[str, Any] | str) -> list[str]:
    """Return the names that a row's tests take from the program, if the row lists them."""
    return [] if isinstance(table, str) else [table["name"]] if "name" in table else table.get("names", [])


def extract_code(text: str, names: Sequence[str] = ()) -> str:
    """Return the last block tagged as Python, else the last untagged one, else the last, else the whole text. Thoughts
    are removed first. Of several blocks the last that defines one of `names` is chosen: an example may follow it."""
    text = without_thoughts(text)
    blocks = fenced(text)
    tagged = [body for language, body in blocks if language in PYTHON]
    untagged = [body for language, body in blocks if not language]
    chosen = tagged or untagged or [body for _, body in blocks] or [text]
    defines = re.compile(rf"^[^\S\n]*+(?:(?:async )?def|class) (?:{'|'.join(map(re.escape, names))})\b", re.MULTILINE)
    return ([body for body in chosen if names and defines.search(body)] or chosen)[-1]


def last_program(text: str) -> str | None:
    """Return the last block tagged as Python, without thoughts; None if there is none."""
    tagged = [body for language, body in fenced(without_thoughts(text)) if language in PYTHON]
    return tagged[-1] if tagged else None


def fenced(text: str) -> list[tuple[str, str]]:
    """Return (language, content) of the blocks between fences of ``` or ~~~, which may be indented or quoted."""
    lines, blocks, place, parsed = text.splitlines(keepends=True), [], 0, 0
    while place < len(lines):
        opening = OPENING.search(lines[place])
        place += 1
        if opening is None:
            continue
        close = re.compile(rf"[\s>]*{opening['fence']}{opening['fence'][0]}*\s*")
        closing = (k for k in range(place, len(lines)) if close.fullmatch(lines[k]))
        ends = list(islice(closing, MOST_ENDS if parsed < MOST_PARSED else 1)) or [len(lines)]
        inside, indent = lines[place : ends[-1]], opening["indent"]
        inside = [each.removeprefix(indent) if each.startswith(indent) else each.lstrip(" \t>") for each in inside]
        bodies = ["".join(inside[: end - place]) for end in ends]
        language = opening["language"].lower()
        # A fence may stand within a text of the program: the first that leaves Python is the end.
        chosen = 0 if language not in (*PYTHON, "") else next((k for k, body in enumerate(bodies) if _parses(body)), 0)
        parsed += chosen or len(ends) * (language in (*PYTHON, ""))
        blocks.append((language, bodies[chosen]))
        place = ends[chosen] + 1
    return blocks


def _parses(source: str) -> bool:
    try:
        with warnings.catch_warnings(action="ignore"):
            ast.parse(source)
        return True
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def _grade_script(server: Server, source: str, table: dict[str, Any], limits: Limits, row: Limits) -> Score:
    """Run the program on each input. After an error no further input is run, because the error decides the tier."""
    outcomes, used_s = list[str](), 0.0
    for given, expected in zip(table["inputs"], table["outputs"], strict=True):
        given, expected = _lines(given), _lines(expected)
        ended = run_script(server, source, given, limits)
        where = f"input:\n{_short(given)}\n"
        if ended.status or ended.timeout:
            return _failure(ended, limits, where, outcomes)
        used_s += ended.cpu_s
        if used_s > row.cpu_s:
            return _tier("time-out", f"{where}not all tests ended {row}", outcomes)
        passed = same_output(ended.output, expected)
        both = f"expected output:\n{_short(expected)}\noutput:\n{_short(ended.output)}"
        outcomes.append("" if passed else where + both)
    return _share_passed(outcomes)


def _grade_module(server: Server, source: str, table: dict[str, Any], limits: Limits, row: Limits) -> Score:
    ended, tests = run_tests(server, source, table, row)
    outcomes = [f"{test}\n{detail}".strip() if what == "fail" else "" for what, test, detail in tests]
    if not tests and "assert" in table.get("code", ""):
        return _share_passed(["no assert of the tests ran"])
    what, _, detail = tests[-1] if tests else ("broken", "", "there is no test among the tests")
    if what == "broken":
        return Score(0.0, error=f"the row's tests: {detail}")
    if what == "error":
        return _tier("runtime error", detail, outcomes[:-1])
    if what == "late":
        return _tier("time-out", f"its results take more than {row.cpu_s:g} s to judge", outcomes[:-1])
    if what != "gone":
        return _share_passed(outcomes)
    if ended.timeout and ended.status not in CALL_LATE:
        return _tier("time-out", f"not all tests ended {row}", outcomes[:-1])
    if ended.timeout or ended.status:
        return _failure(ended, limits, "", outcomes[:-1])
    return _tier("runtime error", "it ended before its tests did", outcomes[:-1])


def _failure(ended: ProgramResult, limits: Limits, where: str, outcomes: list[str]) -> Score:
    """The tier of a run that did not end well."""
    if ended.status == COMPILE_ERROR:
        return _tier("does not compile", ended.errors, outcomes)
    if ended.timeout:
        return _tier("time-out", f"{where}no result {limits}", outcomes)
    how = f"killed by signal {-ended.status}" if ended.status < 0 else f"exit status {ended.status}"
    return _tier("runtime error", where + (ended.errors.strip() or how), outcomes)


def _tier(tier: str, reason: str, outcomes: list[str]) -> Score:
    details = {"tier": tier, "tests": [not each for each in outcomes]}
    return Score(TIERS[tier], f"{tier}: {reason.strip()}", correct=False, details=details)


def _share_passed(outcomes: list[str]) -> Score:
    """Return the score of a program that ran. `outcomes`: for each test an empty text, or how it failed."""
    passed, count = sum(not each for each in outcomes), len(outcomes)
    details = {"tier": "passed" if passed == count else "wrong", "tests": [not each for each in outcomes]}
    if passed == count:
        return Score(1.0, f"all {count} tests passed", correct=True, details=details)
    first = next(each for each in outcomes if each)
    reason = f"{count - passed} of {count} tests failed; the first:\n{first}"
    return Score(NONE_PASSED + 1.3 * passed / count, reason, correct=False, details=details)


def same_output(got: str, expected: str) -> bool:
    """Compare outputs: equal lines except for trailing white space, or equal words, where decimals may differ by
    1e-6."""
    ours, theirs = ([line.rstrip() for line in text.strip().splitlines()] for text in (got, expected))
    if ours == theirs:
        return True
    ours, theirs = got.split(), expected.split()
    return len(ours) == len(theirs) and "." in expected and all(map(_same_word, ours, theirs))


def _same_word(got: str, expected: str) -> bool:
    if got == expected:
        return True
    try:
        number, reference = float(got), float(expected)
    except ValueError:
        return False
    return "." in expected and abs(number - reference) <= 1e-6 * max(1.0, abs(reference))


def _lines(text: Any) -> str:
    """Join the lines of an output that a data set gives as a list."""
    return "\n".join(map(str, text)) if isinstance(text, list) else str(text)


def _short(text: str) -> str:
    text = text.rstrip("\n")
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
