"""Programming: a task, its tests in the form of rewards/code.py, and a reference program where there is one.

The `preamble` of tests is Python that the task shows before the function, so that an answer need not repeat it.
"""

import ast
import base64
import io
import json
import pickle
import re
import zlib
from typing import Any

from megatron_rft.data.fields import Fields, Row, as_row, unusable
from megatron_rft.utils.errors import DataError

NO_TESTS = unusable("no tests that can be run")
NO_ASSERTION = unusable("no assertion among the tests")
AS_PROGRAM = "Write a Python program that reads from standard input and writes to standard output."
AS_FUNCTION = "Complete this code, in Python:\n\n```python\n{starter}\n```"
FORM = "Give the whole program in one ```python block."

# What the original judges of these problems import before a function.
JUDGE = """import bisect, collections, functools, heapq, itertools, math, operator, random, re, string, sys
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from typing import *"""

# On the hub EvalPlus's tests compare floats with numpy. Programs and tests have the standard library alone; this is
# what those tests ask for, of plain values. Its assert counts as the test's own.
NUMPY = """
class np:
    ndarray = ()

    def allclose(got, expected, rtol=1e-5, atol=1e-8):
        if isinstance(expected, (list, tuple)):
            whole = isinstance(got, (list, tuple)) and len(got) == len(expected)
            return whole and all(np.allclose(*pair, rtol, atol) for pair in zip(got, expected))
        both_nan = got != got and expected != expected
        return got == expected or both_nan or abs(got - expected) <= atol + rtol * abs(expected)

    class testing:
        def assert_allclose(got, expected, rtol=1e-7, atol=0):
            assert np.allclose(got, expected, rtol, atol)
"""
# HumanEval+'s test of find_zero unpacks a number there: no program could pass.
ZERO = "assert _poly(*candidate(*inp), inp)", "assert abs(_poly(*inp, candidate(*inp)))"


def humaneval(fields: Fields) -> Row:
    """`test` defines check(candidate)."""
    name, prompt = fields.text("entry_point"), fields.text("prompt")
    solution = prompt + fields.text("canonical_solution")
    code = f"{_without_numpy(fields.text('test'))}\ncheck({name})"
    if not _asserts(code):
        return NO_ASSERTION
    # Imports and helpers that stand before the function which is asked for.
    before = re.split(rf"^(?=def {re.escape(name)}\b)", prompt, maxsplit=1, flags=re.MULTILINE)[0]
    question = f"{AS_FUNCTION.format(starter=prompt.rstrip())}\n\n{FORM}"
    tests = {"kind": "assert", "code": code, "names": [name], "preamble": before.strip()}
    return as_row(question, "", id=fields.get("task_id"), solution=solution, tests=tests)


def _asserts(code: str) -> bool:
    """Whether anything is tested: an assert of more than a constant."""
    try:
        nodes = list(ast.walk(ast.parse(code)))
    except SyntaxError:
        return False
    return any(isinstance(node, ast.Assert) and not isinstance(node.test, ast.Constant) for node in nodes)


def _tested(solution: str, asserts: list[str]) -> list[str]:
    """Names that the solution defines and the asserts use: one task's function is called `sum`, which is not
    Python's."""
    try:
        defined = {node.name for node in ast.parse(solution).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        used = {node.id for node in ast.walk(ast.parse("\n".join(asserts))) if isinstance(node, ast.Name)}
    except SyntaxError:
        return []
    return sorted(defined & used)


def _without_numpy(tests: str) -> str:
    return re.sub(r"^import numpy as np$", lambda _: NUMPY, tests, flags=re.MULTILINE).replace(*ZERO)


def mbpp(fields: Fields) -> Row:
    """The task shows its asserts. `sanitized` and MBPP+ have `prompt` and `test_imports`; MBPP+ has a longer `test`."""
    asserts = [str(each) for each in fields.items("test_list")]
    imports = fields.items("test_imports") if fields.has("test_imports") else []
    setup = "\n".join([*imports, fields.maybe("test_setup_code") or ""]).strip()
    code = _without_numpy(fields.text("test")) if fields.has("test") else "\n".join(asserts)
    if not code.strip():
        return NO_TESTS
    if not _asserts(code):
        return NO_ASSERTION
    shown = "```python\n" + "\n".join(asserts) + "\n```"
    question = f"{fields.text('text', 'prompt').strip()}\n\nYour code must pass these tests:\n\n{shown}\n\n{FORM}"
    optional = {"setup": setup, "names": _tested(fields.maybe("code") or "", asserts)}
    tests = {"kind": "assert", "code": code} | {name: value for name, value in optional.items() if value}
    return as_row(question, "", id=fields.get("task_id"), solution=fields.maybe("code"), tests=tests)


def apps(fields: Fields) -> Row:
    """APPS and TACO: tests and solutions are JSON text; fn_name among the tests makes them calls."""
    question = fields.text("question")
    try:
        tests = fields.object("input_output")
        inputs, outputs, name = tests.items("inputs"), tests.items("outputs"), tests.maybe("fn_name")
    except DataError:  # empty, or with integers beyond what Python reads
        return NO_TESTS
    if not inputs or len(inputs) != len(outputs):
        return NO_TESTS
    return as_row(
        _task(question, fields.maybe("starter_code")),
        "",
        id=fields.maybe("problem_id", "id", "name"),
        level=fields.maybe("difficulty"),
        solution=_first_solution(fields),
        tests=_called(name, inputs, outputs) if name else {"kind": "stdin", "inputs": inputs, "outputs": outputs},
    )


def livecodebench(fields: Fields) -> Row:
    """Public and private tests; those of a function have one JSON value per line for its arguments."""
    cases = [*_cases(fields, "public_test_cases"), *_cases(fields, "private_test_cases")]
    if not cases:
        return NO_TESTS
    name = fields.object("metadata").maybe("func_name") if fields.has("metadata") else None
    inputs, outputs = [case["input"] for case in cases], [case["output"] for case in cases]
    if name:
        try:
            inputs = [[json.loads(line) for line in text.splitlines() if line.strip()] for text in inputs]
            outputs = [json.loads(text) for text in outputs]
        except ValueError as error:
            raise fields.wrong(f"the tests of {name} are not JSON values, one a line ({error})") from None
    kind = {"kind": "call", "name": name, "preamble": JUDGE} if name else {"kind": "stdin"}
    return as_row(
        _task(fields.text("question_content"), fields.maybe("starter_code")),
        "",
        id=fields.maybe("question_id"),
        level=fields.maybe("difficulty"),
        subject=fields.maybe("platform"),
        date=fields.maybe("contest_date"),
        tests=kind | {"inputs": inputs, "outputs": outputs},
    )


def _task(question: str, starter: str | None) -> str:
    wanted = AS_FUNCTION.format(starter=starter.rstrip()) if starter and starter.strip() else AS_PROGRAM
    return f"{question.strip()}\n\n{wanted}\n\n{FORM}"


def _called(name: str, inputs: list, outputs: list) -> dict[str, Any]:
    """In most rows each value stands in a list of one; a row where not all do gives the values themselves."""
    wrapped = all(isinstance(each, list) and len(each) == 1 for each in outputs)
    values = [each[0] for each in outputs] if wrapped else outputs
    return {"kind": "call", "name": name, "inputs": inputs, "outputs": values, "preamble": JUDGE}


def _first_solution(fields: Fields) -> str | None:
    try:
        solutions = fields.items("solutions")
    except DataError:  # some problems have none, and an empty text instead of a list
        return None
    return next((text for text in solutions if isinstance(text, str) and text.strip()), None)


def _cases(fields: Fields, name: str) -> list[dict[str, str]]:
    """JSON text; private tests are also published as base64 of a compressed pickle of that text."""
    value = fields.maybe(name)
    if isinstance(value, str) and value.strip() and value.lstrip()[0] not in "[{":
        try:
            value = _Text(io.BytesIO(zlib.decompress(base64.b64decode(value)))).load()
        except (ValueError, zlib.error, pickle.UnpicklingError, EOFError) as error:
            raise fields.wrong(f"{name} cannot be decoded ({error})") from None
    cases = Fields(fields.row | {name: value}, fields.place, fields.file).items(name)
    if not all(isinstance(case, dict) and {"input", "output"} <= case.keys() for case in cases):
        raise fields.wrong(f"{name} is no list of tests with input and output")
    return cases


class _Text(pickle.Unpickler):
    """Refuses all classes: a pickle may run any code, but a pickled text needs no class."""

    def find_class(self, module: str, name: str):
        raise pickle.UnpicklingError(f"it holds more than text: {module}.{name}")
