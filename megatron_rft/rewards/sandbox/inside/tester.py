"""What runs in the process that judges: the tests of a problem, against functions that live in another process.

The tests are the data set's code, so they too run in a sandbox, but in one that the program cannot reach. A name of
the program is a `Remote` here: calling it sends the arguments over and brings a plain value back. Comparisons,
built-ins and modules are this process's own.
"""

import ast
import builtins
import contextlib
import importlib
import io
import json
import math
import os
import symtable
import sys
from typing import Any, TextIO

import wire

SHOWN = 300  # characters of a value or a test that are told
HIDDEN = object.__getattribute__


class RemoteError(Exception):
    """The program raised something while it answered a call."""


class Remote:
    """A function, class or object of the program. Equal to itself alone, whatever the program says."""

    __slots__ = ("_target", "_ask")

    def __init__(self, target: str | int, ask):
        object.__setattr__(self, "_target", target)
        object.__setattr__(self, "_ask", ask)

    def __call__(self, *args, **kwargs):
        return HIDDEN(self, "_ask")(do="call", target=HIDDEN(self, "_target"), args=args, kwargs=kwargs)

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return HIDDEN(self, "_ask")(do="get", target=HIDDEN(self, "_target"), name=name)

    def __setattr__(self, name: str, value: Any):
        HIDDEN(self, "_ask")(do="set", target=HIDDEN(self, "_target"), name=name, value=value)

    def __repr__(self):
        return f"<an object of the program: {HIDDEN(self, '_target')}>"


class Client:
    """The judging end of the channel to the program."""

    def __init__(self, channel):
        self.channel = channel
        try:
            wire.receive(channel)  # ready, or closed
        except (ValueError, RecursionError):
            raise wire.Closed from None

    def ask(self, **message):
        for name in {"args", "kwargs", "value"} & message.keys():
            message[name] = wire.encode(message[name], _target_of)
        wire.send(self.channel, message)
        try:
            reply = wire.receive(self.channel)
            error = reply.get("error")
            if error is None:
                return wire.decode(reply["value"], lambda number: Remote(int(number), self.ask))
            name, text, trace = str(error), str(reply["message"]), str(reply["trace"])
        except wire.Closed:
            raise
        except Exception as problem:  # too deep, too large, or not what the runner writes: the program's doing
            name, text, trace = "ValueError", "", f"a result that cannot be read: {type(problem).__name__}"
        raise _raised(name, text, trace)


def _target_of(value: Any) -> str | int:
    if type(value) is Remote:
        return HIDDEN(value, "_target")
    raise wire.Unsendable(f"the tests pass a {type(value).__name__}, which is no plain data")


def _raised(name: str, message: str, trace: str) -> RemoteError:
    """An exception that tests can catch as the built-in of that name."""
    base = getattr(builtins, name, None)
    error = RemoteError(message)
    if isinstance(base, type) and issubclass(base, Exception):
        with contextlib.suppress(TypeError):  # UnicodeDecodeError wants five arguments
            error = type(name, (RemoteError, base), {})(message)
    error.trace = trace
    return error


class Report:
    """One JSON line for each test, in order; whoever reads it knows by the last line that it is whole."""

    def __init__(self, file: TextIO):
        self.file = file

    def add(self, outcome: str, test: str = "", detail: str = "") -> None:
        self.file.write(json.dumps([outcome, test[:SHOWN], detail]) + "\n")
        self.file.flush()

    def check(self, passed: Any, test: str) -> None:
        self.add("pass") if passed else self.add("fail", test)

    def equal(self, got: Any, expected: Any, test: str) -> None:
        if got == expected:
            self.add("pass")
        else:
            self.add("fail", test, f"got {_short(got)}, expected {_short(expected)}")

    def failed(self, error: Exception, test: str) -> None:
        """An assert could not be evaluated: an error of the program ends the tests, a wrong type is a wrong answer."""
        if isinstance(error, (RemoteError, wire.Closed, wire.Unsendable)):
            raise error
        self.add("fail", test, f"the result cannot be judged: {type(error).__name__}: {error}"[:SHOWN])


class _Counted(ast.NodeTransformer):
    """Each `assert` reports its outcome and goes on, so that a program's share of passed tests can be counted."""

    def visit_Assert(self, node: ast.Assert):
        if isinstance(node.test, ast.Constant) and node.test.value:
            return ast.Pass()  # "assert True": no test of anything
        text = ast.Constant(ast.unparse(node.test))
        compared = (
            isinstance(node.test, ast.Compare) and len(node.test.ops) == 1 and isinstance(node.test.ops[0], ast.Eq)
        )
        parts = [node.test.left, node.test.comparators[0]] if compared else [node.test]
        report = ast.Call(ast.Name("__equal__" if compared else "__check__", ast.Load()), [*parts, text], [])
        failed = ast.Call(ast.Name("__failed__", ast.Load()), [ast.Name("__error__", ast.Load()), text], [])
        handler = ast.ExceptHandler(ast.Name("Exception", ast.Load()), "__error__", [ast.Expr(failed)])
        return ast.Try([ast.Expr(report)], [handler], [], [])


def run_asserts(code: str, setup: str, names: list[str], client: Client, report: Report) -> None:
    """The data set's asserts. `names` are the program's; a name that nothing else defines is the program's as well."""
    sys.set_int_max_str_digits(300_000)  # some write out such integers; longer ones take seconds to read
    try:
        trees = [ast.parse(setup), ast.parse(code)]
    except SyntaxError as error:
        report.add("broken", detail=f"the tests are no Python: {error}")
        return
    counted = ast.fix_missing_locations(_Counted().visit(trees[1]))
    scope: dict[str, Any] = {"__name__": "tests", "__equal__": report.equal, "__check__": report.check}
    scope["__failed__"] = report.failed
    for name in _foreign(setup, code):
        module = _module(name, trees)
        scope[name] = Remote(name, client.ask) if module is None else module
    exec(compile(trees[0], "setup", "exec"), scope)
    scope |= {name: Remote(name, client.ask) for name in names}  # over what the setup has of that name
    exec(compile(counted, "tests", "exec"), scope)


def _foreign(*sources: str) -> set[str]:
    """Names that the tests read as globals, and nothing of theirs defines."""
    read, made, tables = set(dir(builtins)), set(dir(builtins)), []
    for source in sources:
        top = symtable.symtable(source, "tests", "exec")
        made |= {symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
        read |= {symbol.get_name() for symbol in top.get_symbols() if symbol.is_referenced()}
        tables += top.get_children()
    while tables:
        table = tables.pop()
        read |= {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global()}
        tables += table.get_children()
    return {name for name in read - made if not name.startswith("__")}


def _module(name: str, trees: list[ast.Module]) -> Any:
    """The standard library's `name`, where tests use it as a module without an import of theirs: `math.isclose`."""
    if name not in sys.stdlib_module_names:
        return None
    nodes = [node for tree in trees for node in ast.walk(tree)]
    called = any(isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == name for n in nodes)
    return None if called else importlib.import_module(name)


def run_cases(name: str, cases: list[list], client: Client, report: Report) -> None:
    """[arguments, expected result] each, as JSON has them."""
    for args, expected in cases:
        got = client.ask(do="call", target=name, args=tuple(args), kwargs={})
        text = f"{name}({', '.join(_short(arg) for arg in args)})"
        if same(got, expected):
            report.add("pass")
        else:
            report.add("fail", text, f"got {_short(got)}, expected {_short(expected)}")


def same(got: Any, expected: Any) -> bool:
    """Equal as JSON has it: tuples are lists, numbers may differ by rounding where one of them is a float."""
    if isinstance(got, bool) or isinstance(expected, bool):
        return got is expected
    if isinstance(got, int | float) and isinstance(expected, int | float):
        if isinstance(got, float) or isinstance(expected, float):
            return got == expected or math.isclose(got, expected, rel_tol=1e-6, abs_tol=1e-9)
        return got == expected
    if isinstance(got, list | tuple) and isinstance(expected, list | tuple):
        return len(got) == len(expected) and all(map(same, got, expected))
    if isinstance(got, dict) and isinstance(expected, dict):
        got = {str(key): value for key, value in got.items()}
        expected = {str(key): value for key, value in expected.items()}
        return got.keys() == expected.keys() and all(same(got[key], expected[key]) for key in got)
    return type(got) is type(expected) and got == expected


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def main(task: dict, channel, output: int) -> int:
    """`task` has either `code`, `setup` and `names`, or `name` and `cases`. The report goes to the file `output`."""
    report = Report(os.fdopen(os.dup(output), "w"))
    sys.stdout = sys.stderr = io.StringIO()  # what tests print is nobody's business
    try:
        client = Client(channel)
        if "cases" in task:
            run_cases(task["name"], task["cases"], client, report)
        else:
            run_asserts(task["code"], task["setup"], task["names"], client, report)
    except RemoteError as error:
        report.add("error", detail=getattr(error, "trace", str(error)))
    except wire.Closed:
        report.add("gone")
    except wire.Unsendable as error:
        report.add("broken", detail=str(error))
    except Exception as error:
        report.add("broken", detail=f"the tests raise {type(error).__name__}: {error}")
    report.add("end")
    return 0
