"""Runs an untrusted program in its cell. Nothing in this process can be trusted once the program's code has started.

The process never gets an expected result: it gets inputs and returns outputs and values, which another process judges.
"""

import atexit
import builtins
import contextlib
import ctypes
import linecache
import operator
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from itertools import islice
from types import CodeType, ModuleType
from typing import Any

import wire

FILE = "program.py"
COMPILE_ERROR = 90  # exit status; a program that exits with it only harms itself
TAIL = 1500  # characters of a traceback that are reported
# Of the wall time of a call, without the time spent waiting for a processor:
MAX_WALL_FACTOR = 8  # its limit, as a multiple of the CPU limit; 2 for a program that sleeps
IDLE = 0.02  # share of a processor below which a program counts as sleeping


def compiled(source: str) -> CodeType | None:
    """Compile a program. Returns None, and writes the reason to stderr, if that fails."""
    try:
        code = compile(source, FILE, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        sys.stderr.write("".join(traceback.format_exception_only(error)))
        return None
    linecache.cache[FILE] = (len(source), None, source.splitlines(keepends=True), FILE)
    return code


def explain(error: BaseException) -> str:
    """Return the end of the traceback, without the frames above the program's own."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != FILE:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))[-TAIL:]


def run_script(source: str) -> int:
    """Run the program as a script, from standard input to standard output. Returns the exit status."""
    code = compiled(source)
    if code is None:
        return COMPILE_ERROR
    status = 0
    try:
        exec(code, _globals("__main__"))
    except SystemExit as stop:
        if isinstance(stop.code, str):
            sys.stderr.write(stop.code)
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException as error:
        sys.stderr.write(explain(error))
        return 1
    threading._shutdown()  # waits for threads: solutions often use one for a larger stack
    atexit._run_exitfuncs()
    return status


def _globals(name: str) -> dict[str, Any]:
    """Return the globals for a program as a new module of that name, in which dataclasses and pickle look things up."""
    builtins.exit = builtins.quit = sys.exit
    sys.argv, sys.modules[name] = [FILE], ModuleType(name)
    vars(sys.modules[name]).update(__builtins__=builtins, __file__=FILE)
    return vars(sys.modules[name])


def waited(schedstat: int) -> float:
    """Return the seconds that a process was ready to run, but not running, from its open file of that name in /proc
    (proc(5))."""
    try:
        return int(os.pread(schedstat, 100, 0).split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def serve(source: str, channel: socket.socket, test_s: float, schedstat: int) -> int:
    """Import the program as a module and answer calls of its functions until the channel closes. `test_s`: the CPU
    limit of one call. `schedstat`: the open file of this process."""
    clock = _Clock(test_s, schedstat)
    code = compiled(source)
    if code is None:
        return COMPILE_ERROR
    module = _globals("solution")
    try:
        with clock:
            exec(code, module)
    except BaseException as error:
        sys.stderr.write(explain(error))
        return 1
    wire.send(channel, {"ready": True})
    with contextlib.suppress(wire.Closed):
        _Module(module, channel, clock).serve()
    return 0


class _Clock:
    """Ends the process if a call takes longer than its limit, with the signal's number as the exit status.

    A program can disable this; the limit of the whole row remains. The handler is C's `_exit`, because a Python handler
    would wait for the end of a long operation, and signals without a handler do not end a namespace's first process.
    """

    def __init__(self, seconds: float, schedstat: int):
        self.seconds, self.schedstat, self.depth = seconds, schedstat, 0
        libc = ctypes.CDLL(None)
        libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
        libc.signal(signal.SIGPROF, ctypes.cast(libc._exit, ctypes.c_void_p))
        signal.signal(signal.SIGALRM, self._rings)

    def __enter__(self):
        self.depth += 1
        if self.depth == 1:
            self.start, self.used = self._wall(), time.process_time()
            self._set(self.seconds, 2 * self.seconds)

    def __exit__(self, *error):
        self.depth -= 1
        if self.depth == 0:
            self._set(0, 0)

    def _set(self, cpu_s: float, wall_s: float) -> None:
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        signal.setitimer(signal.ITIMER_REAL, wall_s, wall_s)

    def _wall(self) -> float:
        return time.monotonic() - waited(self.schedstat)

    def _rings(self, *_) -> None:
        passed = self._wall() - self.start
        if time.process_time() - self.used < IDLE * passed or passed >= MAX_WALL_FACTOR * self.seconds:
            os._exit(signal.SIGALRM)


class _Module:
    """Answers the tests' requests. While it answers a call, it can call functions of the tests in turn."""

    def __init__(self, module: dict[str, Any], channel: socket.socket, clock: _Clock):
        self.module, self.channel, self.clock = module, channel, clock
        self.objects: list[Any] = []  # objects that the other side refers to by index
        self.numbers: dict[int, int] = {}  # of an object by its id

    def serve(self) -> None:
        while True:
            self._reply(wire.receive(self.channel))

    def _reply(self, message: dict) -> None:
        with self.clock:
            answer = self._answer(message)
        try:
            wire.send(self.channel, answer)
        except wire.Unsendable as error:
            wire.send(self.channel, {"error": "ValueError", "message": str(error), "trace": f"the result is {error}"})

    def _answer(self, message: dict) -> dict:
        try:
            match message["do"]:
                case "call":
                    return self._call(message)
                case "next":
                    return self._next(self._target(message["target"]), message["count"])
                case "special":  # len(x), x[1], str(x) ...
                    arguments = wire.decode(message["args"], self._target)
                    value = SPECIAL[message["name"]](self._target(message["target"]), *arguments)
            return {"value": wire.encode(value, self._reference)}
        except BaseException as error:
            return self._error(error)

    def _call(self, message: dict) -> dict:
        function = self._target(message["target"])
        arguments, named = (wire.decode(message[name], self._target) for name in ("args", "kwargs"))
        value = function(*arguments, **named)
        same = next((k for k, each in enumerate(arguments) if each is value and _changes(each)), None)
        answer = {"value": wire.encode(value, self._reference) if same is None else {"argument": same}}
        for name, values, given in (("args", arguments, arguments), ("kwargs", named, tuple(named.values()))):
            if any(map(_changes, given)) and (after := wire.encode(values, self._reference)) != message[name]:
                answer[name] = after
        return answer

    def _next(self, iterator: Iterator, count: int) -> dict:
        """Return at most `count` values of an iterator, and the exception after them, if one was raised."""
        values, ended = [], None
        try:
            values.extend(islice(iterator, min(count, wire.BATCH)))
        except BaseException as error:
            ended = self._error(error)
        return {"value": wire.encode(values, self._reference), "then": ended}

    def _error(self, error: BaseException) -> dict:
        text = ""
        with contextlib.suppress(Exception):
            text = str(error)[:500]
        return {"error": type(error).__name__, "message": text, "trace": explain(error)}

    def _reference(self, value: Any) -> Any:
        if isinstance(value, _Callback):
            return {"callback": value.number}
        number = self.numbers.setdefault(id(value), len(self.objects))
        if number == len(self.objects):
            self.objects.append(value)
        plain = isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools")
        return {"iterator" if plain else "object": number}

    def _target(self, what: Any) -> Any:
        """Return an object of this process by its index or name, or a function of the tests."""
        if isinstance(what, dict):
            return _Callback(what["callback"], self)
        return self.objects[what] if isinstance(what, int) else _named(self.module, what)

    def ask(self, number: int, args: tuple, kwargs: dict) -> Any:
        """Call a function of the tests."""
        arguments = [wire.encode(each, self._reference) for each in (args, kwargs)]
        wire.send(self.channel, {"callback": number, "args": arguments[0], "kwargs": arguments[1]})
        while "returned" not in (message := wire.receive(self.channel)):
            self._reply(message)  # the function calls one of the program's
        if message["returned"] is None:
            error = getattr(builtins, message["error"], Exception)
            raise error(message["message"])
        return wire.decode(message["returned"]["value"], self._target)


class _Callback:
    """A function that the tests passed, or the `__next__` of an iterator."""

    def __init__(self, number: int, module: _Module):
        self.number, self._module = number, module

    def __call__(self, *args, **kwargs):
        return self._module.ask(self.number, args, kwargs)

    def __iter__(self):
        return self

    __next__ = __call__


PLAIN = (getattr, setattr, len, iter, next, str, repr, operator.getitem, operator.setitem, operator.delitem)
SPECIAL = {each.__name__: each for each in PLAIN} | {"isinstance": lambda kind, value: isinstance(value, kind)}


def _changes(value: Any) -> bool:
    """Return whether a function may change an argument of this type in place."""
    if isinstance(value, tuple):
        return any(map(_changes, value))
    return not isinstance(value, int | float | str | bytes | complex | frozenset | type(None) | _Callback)


def _named(module: dict[str, Any], name: str) -> Any:
    """Return a global of the program, or a method of its class Solution, which some judges use."""
    if name in module:
        return module[name]
    if hasattr(module.get("Solution"), name):
        return getattr(module["Solution"](), name)
    raise NameError(f"name {name!r} is not defined")


def leave(status: int) -> None:
    """Exit without the interpreter's clean-up, which belongs to the server that was forked."""
    for stream in (sys.stdout, sys.__stdout__, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, ValueError):  # the program has removed or closed it
            continue
        except BaseException:
            status = status or 1
    os._exit(status & 0xFF)
