"""Runs the tests of a problem against functions of a program in another process.

The tests are code of the data set, so they also run in a cell, which the program cannot reach. A name of the program is
a `Remote` in this process: a call sends the arguments to the program and returns a plain value. Comparisons, built-ins
and modules are those of this process.
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
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO

import wire

SHOWN = 300  # characters of a value or a test that are reported
LONGEST = 1 << 20  # values of an iterator that are read
HIDDEN = object.__getattribute__


class RemoteError(Exception):
    """The program raised an exception while it answered a call."""


def _special(name: str, made: Callable = lambda answer: answer) -> Callable:
    """Return a method that asks the program for `name` of its object, and makes a value of the answer."""
    return lambda self, *args: made(_ask(self, name, *args))


class Remote:
    """A function, class or object of the program. It is equal only to itself; the program's `__eq__` is not called."""

    __slots__ = ("_target", "_client")

    def __init__(self, target: str | int, client: "Client"):
        object.__setattr__(self, "_target", target)
        object.__setattr__(self, "_client", client)

    def __call__(self, *args, **kwargs):
        return HIDDEN(self, "_client").call(HIDDEN(self, "_target"), args, kwargs)

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return _ask(self, "getattr", name)

    __setattr__ = _special("setattr")
    __len__, __iter__, __next__ = _special("len"), _special("iter"), _special("next")
    __getitem__, __setitem__, __delitem__ = _special("getitem"), _special("setitem"), _special("delitem")
    __str__, __repr__ = _special("str", str), _special("repr", str)
    __instancecheck__ = _special("isinstance", lambda answer: answer is True)

    def __bool__(self):
        return True


class RemoteIterator:
    """An iterator of the program, such as a generator. Comparisons use the list of its values."""

    def __init__(self, target: int, client: "Client"):
        self._target, self._values = target, _values(target, client)

    def __iter__(self):
        return self

    def __next__(self):
        return next(self._values)

    def __eq__(self, other: Any):
        return settled(self) == other

    __hash__ = object.__hash__


def _values(target: int, client: "Client") -> Iterator[Any]:
    """Yield the values of an iterator of the program, which sends them in growing batches."""
    count, total, ended = 1, 0, False
    while not ended:
        values, then = client.next(target, count)
        ended, count, total = len(values) < count, min(2 * count, wire.BATCH), total + len(values)
        if total > LONGEST:
            raise _unreadable(ValueError(f"an iterator of more than {LONGEST} values"))
        yield from values
        if then is not None:
            raise then


def _ask(remote: Remote, name: str, *args) -> Any:
    return HIDDEN(remote, "_client").ask(HIDDEN(remote, "_target"), name, args)


class Client:
    """The tests' end of the channel to the program."""

    def __init__(self, channel):
        self.channel = channel
        self.passed: list[Any] = []  # functions of the tests, which the program refers to by index
        self.objects: dict[int, Any] = {}  # of the program, each once, so that `is` works
        self.answered = False  # whether the program has answered anything
        try:
            wire.receive(channel, 1000)  # ready, or closed
        except (ValueError, RecursionError):
            raise wire.Closed from None

    def call(self, target: str | int, args: tuple, kwargs: dict) -> Any:
        """Call a function of the program. Changes that it made to its arguments are applied to `args`."""
        reply = self._reply(do="call", target=target, args=args, kwargs=kwargs)
        with _reading():
            for old, name in ((args, "args"), (kwargs, "kwargs")):
                if name in reply:
                    wire.update(old, wire.decode(reply[name], self._object))
            if "argument" in reply["value"] if isinstance(reply["value"], dict) else False:
                return args[reply["value"]["argument"]]
            return wire.decode(reply["value"], self._object)

    def next(self, target: int, count: int) -> tuple[list, RemoteError | None]:
        """Return up to `count` values of an iterator, and the error that ended it."""
        reply = self._reply(do="next", target=target, count=count)
        with _reading():
            then = reply.get("then")
            values = list(wire.decode(reply["value"], self._object))
            return values, _raised(then["error"], then["message"], then["trace"]) if then else None

    def ask(self, target: int | str, name: str, args: tuple) -> Any:
        """Return what a function of program.py's SPECIAL gives for an object of the program."""
        reply = self._reply(do="special", name=name, target=target, args=args)
        with _reading():
            return wire.decode(reply["value"], self._object)

    def _reply(self, **message) -> dict:
        """Send a message and return the answer. Meanwhile the program may call functions that the tests passed."""
        for name in {"args", "kwargs"} & message.keys():
            message[name] = wire.encode(message[name], self._reference)
        wire.send(self.channel, message)
        try:
            while "callback" in (reply := self._receive()):
                wire.send(self.channel, self._called(reply))
            self.answered = True
            error = reply.get("error")
            if error is None:
                reply["value"]
                return reply
            name, text, trace = str(error), str(reply["message"]), str(reply["trace"])
        except (wire.Closed, wire.Unsendable):
            raise
        except Exception as problem:  # the program has forged or damaged the answer
            raise _unreadable(problem) from None
        raise _raised(name, text, trace)

    def _receive(self) -> dict:
        reply = wire.receive(self.channel)
        if wire.too_slow(reply):
            raise ValueError(f"more than {wire.HASHED} numbers beyond 2**53")
        return reply

    def _called(self, message: dict) -> dict:
        """Call a function of the tests for the program."""
        try:
            args, kwargs = (wire.decode(message[name], self._object) for name in ("args", "kwargs"))
            value = self.passed[message["callback"]](*args, **dict(kwargs))
            return {"returned": {"value": wire.encode(value, self._reference)}}
        except wire.Closed:
            raise
        except Exception as error:
            known = next(each.__name__ for each in type(error).__mro__ if hasattr(builtins, each.__name__))
            return {"returned": None, "error": known, "message": str(error)[:500]}

    def _object(self, what: Any) -> Any:
        ((kind, number),) = what.items()
        if kind == "callback":
            return self.passed[number]
        if number not in self.objects:
            self.objects[number] = (RemoteIterator if kind == "iterator" else Remote)(int(number), self)
        return self.objects[number]

    def _reference(self, value: Any) -> Any:
        if type(value) is Remote:
            return HIDDEN(value, "_target")
        if type(value) is RemoteIterator:
            return value._target
        if callable(value) or isinstance(value, Iterator):
            self.passed.append(value.__next__ if isinstance(value, Iterator) else value)
            return {"callback": len(self.passed) - 1}
        raise wire.Unsendable(f"the tests pass a {type(value).__name__}, which is no plain data")


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    """Within it, an exception is the program's error: its answer is forged or cannot be read."""
    try:
        yield
    except Exception as problem:
        raise _unreadable(problem) from None


def _unreadable(problem: Exception) -> RemoteError:
    """Return the error of a program whose result is too deep, too large or forged."""
    return _raised("ValueError", "", f"a result that cannot be read: {type(problem).__name__}: {problem}"[:SHOWN])


def _raised(name: str, message: str, trace: str) -> RemoteError:
    """Return an exception that tests can catch as the built-in of that name."""
    base = getattr(builtins, name, None)
    error = RemoteError(message)
    if isinstance(base, type) and issubclass(base, Exception):
        with contextlib.suppress(TypeError):  # UnicodeDecodeError needs five arguments
            error = type(name, (RemoteError, base), {})(message)
    error.trace = trace
    return error


class Report:
    """Writes one JSON line for each test, in order. The last line marks a complete report."""

    def __init__(self, file: TextIO):
        self.file, self.places = file, {}

    def add(self, outcome: str, test: str = "", detail: str = "", place: int | None = None) -> None:
        """`place`: of an assert. It is one test, however often it runs, and fails if it fails once."""
        if place is None or self.places.get(place) not in (outcome, "fail"):
            self.file.write(json.dumps([outcome, test[:SHOWN], detail, place]) + "\n")
            self.file.flush()
            self.places[place] = outcome

    def check(self, passed: Any, test: str, place: int) -> None:
        self.add("pass" if passed else "fail", test, place=place)

    def equal(self, got: Any, expected: Any, test: str, place: int) -> None:
        got = settled(got)
        alike = got == expected
        detail = "" if alike else f"got {_short(got)}, expected {_short(expected)}"
        self.add("pass" if alike else "fail", test, detail, place)

    def failed(self, error: Exception, test: str, place: int | None = None) -> None:
        """Report an assert that raised. An error of the program ends the tests; a value of a wrong type is a wrong
        answer."""
        if isinstance(error, (RemoteError, wire.Closed, wire.Unsendable)):
            raise error
        self.add("fail", test, f"the result cannot be judged: {type(error).__name__}: {error}"[:SHOWN], place)


class _Counted(ast.NodeTransformer):
    """Makes each `assert` report its outcome and continue, so that the share of passed tests can be counted."""

    places = 0

    def visit_Assert(self, node: ast.Assert):
        if isinstance(node.test, ast.Constant) and node.test.value:
            return ast.Pass()  # "assert True" tests nothing
        text = [ast.Constant(ast.unparse(node.test)), ast.Constant(self.places)]
        self.places += 1
        test = node.test
        compared = isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq)
        parts = [test.left, test.comparators[0]] if compared else [test]
        report = ast.Call(ast.Name("__equal__" if compared else "__check__", ast.Load()), [*parts, *text], [])
        failed = ast.Call(ast.Name("__failed__", ast.Load()), [ast.Name("__error__", ast.Load()), *text], [])
        handler = ast.ExceptHandler(ast.Name("Exception", ast.Load()), "__error__", [ast.Expr(failed)])
        return ast.Try([ast.Expr(report)], [handler], [], [])


def run_asserts(code: str, setup: str, names: list[str], client: Client, report: Report) -> None:
    """Run the data set's asserts. `names`, and names that nothing else defines, are taken from the program."""
    try:
        trees = [ast.parse(setup), ast.parse(code)]
    except SyntaxError as error:
        report.add("broken", detail=f"the tests are no Python: {error}")
        return
    counted = ast.fix_missing_locations(_Counted().visit(trees[1]))
    scope: dict[str, Any] = {"__name__": "tests", "__equal__": report.equal, "__check__": report.check}
    scope["__failed__"] = report.failed
    for name in _undefined(setup, code):
        module = _module(name, trees)
        scope[name] = Remote(name, client) if module is None else module
    exec(compile(trees[0], "setup", "exec"), scope)
    scope |= {name: Remote(name, client) for name in names}  # replaces definitions in the setup
    exec(compile(counted, "tests", "exec"), scope)


def _undefined(*sources: str) -> set[str]:
    """Return the global names that the tests read but do not define."""
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
    """Import the module `name` of the standard library if tests use it without importing it, as in `math.isclose`."""
    if name not in sys.stdlib_module_names:
        return None
    nodes = [node for tree in trees for node in ast.walk(tree)]
    called = any(isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == name for n in nodes)
    return None if called else importlib.import_module(name)


def run_cases(name: str, cases: Iterable[tuple[list, Any]], client: Client, report: Report) -> None:
    """Run cases: (arguments, expected result) each, from JSON."""
    for args, expected in cases:
        text = f"{name}({', '.join(_short(arg) for arg in args)})"
        got = settled(client.call(name, tuple(args), {}))
        try:
            alike = same(got, expected)
        except (ValueError, OverflowError, RecursionError):  # it cannot be compared, such as a key of 5,000 digits
            alike = False
        if alike:
            report.add("pass")
        else:
            report.add("fail", text, f"got {_short(got)}, expected {_short(expected)}")


def settled(value: Any) -> Any:
    """Replace iterators of the program by lists of their values."""
    if type(value) is RemoteIterator:
        return settled(list(value))
    if type(value) in (list, tuple) and any(type(each) in (RemoteIterator, list, tuple) for each in value):
        return type(value)(map(settled, value))
    return value


def same(got: Any, expected: Any) -> bool:
    """Compare as JSON values: tuples equal lists, and numbers may differ by rounding if a float is expected."""
    if isinstance(got, bool) or isinstance(expected, bool):
        return got is expected
    if isinstance(got, int | float) and isinstance(expected, int | float):
        close = isinstance(expected, float) and math.isclose(got, expected, rel_tol=1e-6, abs_tol=1e-9)
        return got == expected or close
    if isinstance(got, list | tuple) and isinstance(expected, list | tuple):
        return len(got) == len(expected) and all(map(same, got, expected))
    if isinstance(got, dict) and isinstance(expected, dict):
        got, expected = ({_key(key): value for key, value in each.items()} for each in (got, expected))
        return got.keys() == expected.keys() and all(same(got[key], expected[key]) for key in got)
    return type(got) is type(expected) and got == expected


def _key(key: Any) -> str:
    """The key as JSON writes it: null, true, 1."""
    return json.dumps(key) if key is None or isinstance(key, bool) else str(key)


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError) as error:  # an integer with more digits than Python converts
        return f"a {type(value).__name__} that cannot be shown ({error})"[:SHOWN]
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def main(table: dict, channel) -> int:
    """Run the tests of a row (code.py) of kind "call" or "assert". The report goes to standard output."""
    report = Report(os.fdopen(os.dup(1), "w"))
    sys.set_int_max_str_digits(300_000)  # some tests have such integers; longer ones take seconds to parse
    sys.stdout = sys.stderr = io.StringIO()  # discards what tests print
    client = None
    try:
        client = Client(channel)
        if table["kind"] == "call":
            run_cases(table["name"], zip(table["inputs"], table["outputs"], strict=True), client, report)
        else:
            run_asserts(table["code"], table.get("setup", ""), table.get("names", []), client, report)
    except RemoteError as error:
        report.add("error", detail=getattr(error, "trace", str(error)))
    except wire.Closed:
        report.add("gone")
    except wire.TooLarge as error:  # the program returned it, and the tests pass it back
        report.add("fail" if client is not None and client.answered else "broken", detail=str(error))
    except wire.Unsendable as error:
        report.add("broken", detail=str(error))
    except Exception as error:
        if client is not None and client.answered:  # the program returned an unexpected type: a wrong answer
            report.failed(error, "")
        else:
            report.add("broken", detail=f"the tests raise {type(error).__name__}: {error}")
    report.add("end")
    return 0
