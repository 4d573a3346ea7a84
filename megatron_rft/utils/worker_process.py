"""Runs a user's code in processes of its own: what is slow, dead or broken there costs an answer and not the run.

`WorkerProcess` is the run's side, `serve` the process's. Messages are pickled, so that a row's fields are as they were
loaded. Answers are JSON: {"value": ...}, {"error": text} if the code has failed this once, or {"broken": text} if it
cannot be right. The first one says whether the code is there.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from megatron_rft.utils.errors import CodeError, ConfigError, UserError
from megatron_rft.utils.processes import end_reaper, start_helper
from megatron_rft.utils.user_code import place

START_TIMEOUT_S = 120.0  # imports on a busy machine
EXIT_TIMEOUT_S = 10.0  # on a busy machine


class CallFailed(Exception):
    """The code raised, was late, or its process died."""


class ProcessLost(CallFailed):
    """Its process died."""


class WorkerProcess:
    """One process of `python -m module`, started when it is needed and replaced when it is lost.

    `section`: the recipe's, for messages. `limit`: its option that `timeout_s` is. `log`: of its output; None: the
    run's. `about`: what the process says of its code when it starts.
    """

    def __init__(self, module: str, options: dict, timeout_s: float, log: Path | None, section: str, limit: str):
        self.module, self.options, self.timeout_s, self.log = module, options, timeout_s, log
        self.section, self.limit, self.closed = section, limit, False
        self.thread = ThreadPoolExecutor(1, thread_name_prefix=section)  # that of its calls
        self.process: subprocess.Popen | None = None
        self.about: Any = None

    def running(self) -> subprocess.Popen:
        """The process, started if there is none. Raises ConfigError if its code cannot be used."""
        if self.process is not None:
            return self.process
        self.connection, theirs = Pipe()
        with theirs:
            command = [sys.executable, "-m", self.module, str(theirs.fileno()), json.dumps(self.options)]
            options = {"env": os.environ | {"PYTHONHASHSEED": "0"}, "pass_fds": (theirs.fileno(),)}
            self.process = process = start_helper(command, reap=True, log=self.log, **options)
        if self.closed:
            end_reaper(process)
        try:
            self.about = self._receive(START_TIMEOUT_S, f"when its process started{self.log and f': {self.log}'}")
        except CallFailed as error:
            self._end()
            place = "" if str(error).startswith(self.section) else f"{self.section}: "
            raise ConfigError(f"{place}{error}") from None
        return process

    def answer(self, **message: Any) -> Any:
        """Send a message and return the answer. Raises CallFailed."""
        self.send(**message)
        return self.receive()

    def send(self, **message: Any) -> None:
        try:
            self.connection.send(message)
        except OSError:
            raise ProcessLost(self._lost()) from None

    def receive(self, grace_s: float = 0.0) -> Any:
        """The next answer. Raises CallFailed; CodeError if the code cannot be right."""
        return self._receive(self.timeout_s, self.limit, grace_s)

    def _receive(self, timeout_s: float, limit: str, grace_s: float = 0.0) -> Any:
        try:
            if not self.connection.poll(timeout_s + grace_s):
                self._end()
                raise CallFailed(late(timeout_s, limit))
            answer = json.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            raise ProcessLost(self._lost()) from None
        if "broken" in answer:
            raise CodeError(answer["broken"])
        if "error" in answer:
            raise CallFailed(answer["error"])
        return answer["value"]

    def _lost(self) -> str:
        try:
            status = self.process.wait(EXIT_TIMEOUT_S)
            how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        except subprocess.TimeoutExpired:
            how = "closed its connection"
        self._end()
        return f"its process {how}" + (f"; its output is in {self.log}" if self.log else "")

    def close(self) -> None:
        """Kill the process, with all that it started. A call that waits for its answer fails first: if two threads
        closed the connection, the second might close a file that has its number by then."""
        self.closed = True
        if process := self.process:
            end_reaper(process)
        self.thread.shutdown(cancel_futures=True)
        self._end()

    def _end(self) -> None:
        if self.process is not None:
            end_reaper(self.process)
            self.connection.close()
        self.process = None


def serve(make: Callable[..., tuple[Callable[..., None], Any]]) -> None:
    """The main program of such a process. `make(**options)` returns the function that is called with each message, and
    first with a function that sends an answer; and what the run should know of it."""
    connection, options = Connection(int(sys.argv[1])), json.loads(sys.argv[2])

    def send(answer: dict[str, Any]) -> None:
        connection.send_bytes(json.dumps(answer).encode())

    try:
        handle, about = make(**options)
    except BaseException as error:
        return send({"error": str(error)} if isinstance(error, UserError) else failure(error))
    send({"value": about})
    while True:
        try:
            message = connection.recv()
        except (EOFError, OSError):
            return  # the run has ended, or the code has closed its files
        handle(send, **message)


def late(timeout_s: float, limit: str) -> str:
    return f"gave no answer within {timeout_s:g} s ({limit})"


def failure(error: BaseException) -> dict[str, Any]:
    """The answer to a call that raised. The text can be written to any file."""
    if isinstance(error, CodeError):
        return {"broken": str(error)}
    text = f"{type(error).__name__}: {error} ({place(error)})"
    return {"error": text.encode(errors="backslashreplace").decode()}
