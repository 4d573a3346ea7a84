"""What runs in the process of an untrusted program. Nothing in it is trusted once the program's code has begun.

It never sees an expected result: inputs come in, outputs and values go out, and are judged elsewhere.
"""

import atexit
import builtins
import contextlib
import ctypes
import linecache
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from itertools import islice
from types import CodeType
from typing import Any

import wire

FILE = "program.py"
COMPILES_NOT = 90  # exit status; a program that exits with it alone harms itself
TAIL = 1500  # characters of a traceback that are told
PATIENCE = 8  # times the limit of processor time that a call may take by the clock; 2 where it sleeps
IDLE = 0.02  # share of a processor below which a program sleeps
BATCH = 256  # values of an iterator in one message


def compiled(source: str) -> CodeType | None:
    """None, and the reason on stderr, where the source is no Python."""
    try:
        code = compile(source, FILE, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        sys.stderr.write("".join(traceback.format_exception_only(error)))
        return None
    linecache.cache[FILE] = (len(source), None, source.splitlines(keepends=True), FILE)
    return code


def explain(error: BaseException) -> str:
    """The traceback from the program's first line on, its last characters."""
    place = error.__traceback__
    while place is not None and place.tb_frame.f_code.co_filename != FILE:
        place = place.tb_next
    return "".join(traceback.format_exception(type(error), error, place))[-TAIL:]


def run_script(source: str) -> int:
    """The program as a script, from standard input to standard output; the exit status."""
    builtins.exit = builtins.quit = sys.exit
    code = compiled(source)
    if code is None:
        return COMPILES_NOT
    try:
        exec(code, {"__name__": "__main__", "__builtins__": builtins, "__file__": FILE})
        threading._shutdown()  # solutions often work in a thread, for a larger stack
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except SystemExit as stop:
        threading._shutdown()
        sys.stdout.flush()
        if isinstance(stop.code, str):
            sys.stderr.write(stop.code)
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException as error:
        sys.stderr.write(explain(error))
        return 1
    return 0


def serve(source: str, channel: socket.socket, test_s: float) -> int:
    """The program as a module, whose functions answer calls until the channel closes. `test_s`: of one call."""
    builtins.exit = builtins.quit = sys.exit
    clock = _Clock(test_s)
    code = compiled(source)
    if code is None:
        return COMPILES_NOT
    module: dict[str, Any] = {"__name__": "solution", "__builtins__": builtins, "__file__": FILE}
    try:
        with clock:
            exec(code, module)
    except BaseException as error:
        sys.stderr.write(explain(error))
        return 1
    wire.send(channel, {"ready": True})
    try:
        _Module(module, channel, clock).serve()
    except wire.Closed:
        return 0
    return 0


class _Clock:
    """Ends the process where a call takes longer than its limit, with the number of the signal as its exit status.

    A program can undo that; it then has the time of the whole row. The handlers are C's `_exit`, since Python's would
    wait for the end of a long operation, and signals without a handler do nothing to a namespace's first process.
    """

    def __init__(self, seconds: float):
        self.seconds, self.depth = seconds, 0
        libc = ctypes.CDLL(None)
        libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
        libc.signal(signal.SIGPROF, ctypes.cast(libc._exit, ctypes.c_void_p))
        signal.signal(signal.SIGALRM, self._rings)

    def __enter__(self):
        self.depth += 1
        if self.depth == 1:
            self.start, self.used = time.monotonic(), time.process_time()
            self._set(self.seconds, 2 * self.seconds)

    def __exit__(self, *error):
        self.depth -= 1
        if self.depth == 0:
            self._set(0, 0)

    def _set(self, cpu_s: float, wall_s: float) -> None:
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        signal.setitimer(signal.ITIMER_REAL, wall_s, wall_s)

    def _rings(self, *_) -> None:
        passed = time.monotonic() - self.start
        if time.process_time() - self.used < IDLE * passed or passed >= PATIENCE * self.seconds:
            os._exit(signal.SIGALRM)


class _Module:
    """Answers what the tests ask. Calls of the tests' own functions go the other way, while a call is answered."""

    def __init__(self, module: dict[str, Any], channel: socket.socket, clock: _Clock):
        self.module, self.channel, self.clock = module, channel, clock
        self.held: list[Any] = []  # objects that the other side knows by number

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
                case "get":
                    value = getattr(self._target(message["target"]), message["name"])
                case "set":
                    place = self._target(message["target"])
                    value = setattr(place, message["name"], wire.decode(message["value"], self._target))
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
        arguments, named = (
            wire.decode(message["args"], self._target),
            dict(wire.decode(message["kwargs"], self._target)),
        )
        value = function(*arguments, **named)
        same = next((k for k, each in enumerate(arguments) if each is value and _changes(each)), None)
        answer = {"value": wire.encode(value, self._reference) if same is None else {"argument": same}}
        if any(map(_changes, arguments)):
            after = wire.encode(arguments, self._reference)
            if after != message["args"]:
                answer["args"] = after
        return answer

    def _next(self, iterator: Iterator, count: int) -> dict:
        """At most `count` values; an exception comes after the values before it."""
        values, ended = [], None
        try:
            values.extend(islice(iterator, min(count, BATCH)))
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
        self.held.append(value)
        return {"iterator" if isinstance(value, Iterator) else "object": len(self.held) - 1}

    def _target(self, what: Any) -> Any:
        """An object that stays here, by its number or its name; or a function of the tests."""
        if isinstance(what, dict):
            return _Callback(what["callback"], self)
        return self.held[what] if isinstance(what, int) else _named(self.module, what)

    def ask(self, number: int, args: tuple, kwargs: dict) -> Any:
        """Calls a function of the tests."""
        arguments = [wire.encode(each, self._reference) for each in (args, kwargs)]
        wire.send(self.channel, {"callback": number, "args": arguments[0], "kwargs": arguments[1]})
        while "returned" not in (message := wire.receive(self.channel)):
            self._reply(message)  # the function calls one of ours
        if message["returned"] is None:
            error = getattr(builtins, message["error"], Exception)
            raise error(message["message"])
        return wire.decode(message["returned"]["value"], self._target)


class _Callback:
    """A function that the tests passed."""

    def __init__(self, number: int, module: _Module):
        self.number, self._module = number, module

    def __call__(self, *args, **kwargs):
        return self._module.ask(self.number, args, kwargs)


SPECIAL = {
    "len": len,
    "iter": iter,
    "str": str,
    "repr": repr,
    "getitem": lambda value, key: value[key],
    "setitem": lambda value, key, item: value.__setitem__(key, item),
    "delitem": lambda value, key: value.__delitem__(key),
}


def _changes(value: Any) -> bool:
    """Whether a function may change an argument of this type in place."""
    if isinstance(value, tuple):
        return any(map(_changes, value))
    return not isinstance(value, int | float | str | bytes | complex | frozenset | type(None) | _Callback)


def _named(module: dict[str, Any], name: str) -> Any:
    """A global of the program, or the method of its class Solution, as some judges have it."""
    if name in module:
        return module[name]
    if hasattr(module.get("Solution"), name):
        return getattr(module["Solution"](), name)
    raise NameError(f"name {name!r} is not defined")


def leave(status: int) -> None:
    """Without the interpreter's own clean-up, which belongs to the server that was forked."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            status = status or 1
    os._exit(status & 0xFF)
