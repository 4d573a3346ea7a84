"""Runs programs in cells, on a pool of servers, and reads their results after they have ended.

A script (standard input to standard output) runs in one cell. A module under test needs two: one for the program and
one for the tests, with a socket between them for calls and plain values. The program's cell never gets an expected
result.
"""

import json
import math
import os
import platform
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from queue import SimpleQueue
from typing import Any, BinaryIO

from megatron_rft.rewards.sandbox.launch import CALL_LATE, SandboxError, Server
from megatron_rft.utils.errors import ConfigError

MAX_WAIT_FACTOR = 3  # a cell may wait for a processor for at most so many times its wall limit
GRACE_S = 5.0  # time beyond a cell's own limit after which its server is replaced
MAX_ERROR_CHARS = 2000  # of standard error that are read


@dataclass(frozen=True)
class Limits:
    """The limits of one process: a script on one input, or a module under all tests of its row."""

    cpu_s: float = 5.0
    wall_s: float = 10.0  # wall time without the time spent waiting for a processor
    memory_mb: int = 1024
    disk_mb: int = 32
    output_mb: int = 8
    test_s: float = 5.0  # CPU seconds of one call of a module's function

    def __str__(self) -> str:
        return f"within {self.cpu_s:g} s of computing and {self.wall_s:g} s in all"


@dataclass(frozen=True)
class ProgramResult:
    """The result of a program's process. A negative `status` is the signal that killed it."""

    status: int
    timeout: bool
    output: str
    errors: str  # the end of its standard error
    cpu_s: float


def run_script(server: Server, source: str, text: str, limits: Limits) -> ProgramResult:
    """Run a program on one input."""
    with ExitStack() as stack:
        stdin, out, err, payload = (stack.enter_context(_file(each)) for each in (text, "", "", source))
        _order(server, "script", limits, [stdin, out, err, payload])
        ended = _collect(server, {"script"}, limits.wall_s)
        return _read(ended["script"], out, err, limits)


def run_tests(
    server: Server, source: str, table: dict[str, Any], limits: Limits
) -> tuple[ProgramResult, list[tuple[str, str, str]]]:
    """Run a program under the tests of a row, of kind "call" or "assert" (code.py). Returns its run, and (outcome,
    test, detail) of each finished test: pass, fail, and at the end also error, broken, gone, or late if judging the
    results exceeded the time limit."""
    longest = (1 + MAX_WAIT_FACTOR) * limits.wall_s + 1  # so that the program's limit ends before that of its tests
    ours = Limits(limits.cpu_s, longest, limits.memory_mb, 1, 2 * limits.output_mb)
    with ExitStack() as stack:
        ends = [stack.enter_context(end) for end in socket.socketpair()]
        empty, out, err, payload, asked, report, mute = (
            stack.enter_context(_file(each)) for each in ("", "", "", source, json.dumps(table), "", "")
        )
        _order(server, "module", limits, [empty, out, err, payload, ends[0]])
        _order(server, "tests", ours, [empty, report, mute, asked, ends[1]])
        for end in ends:
            end.close()  # so that each side sees when the other one ends
        ended = _collect(server, {"module", "tests"}, ours.wall_s)
        judged = _read(ended["tests"], report, mute, ours)
        ran = _read(ended["module"], out, err, limits)
        late = ran.timeout or ran.status in CALL_LATE
        tests = _outcomes(judged)
        if judged.timeout and not late and tests[-1:] == [("gone", "", "")]:
            tests[-1] = ("late", "", "")
        return replace(ran, timeout=late), tests


def _file(text: str) -> BinaryIO:
    """Return a file in memory with `text`."""
    file = os.fdopen(os.memfd_create("cell"), "w+b")
    file.write(text.encode("utf-8", "surrogatepass"))
    file.seek(0)
    return file


def _order(server: Server, role: str, limits: Limits, files: list[BinaryIO | socket.socket]) -> None:
    order = {"role": role, "max_wait_s": MAX_WAIT_FACTOR * limits.wall_s, **asdict(limits)}
    try:
        socket.send_fds(server.socket, [json.dumps(order).encode()], [file.fileno() for file in files])
    except OSError as error:
        raise SandboxError(f"the sandbox's server is gone: {error}") from None


def _collect(server: Server, roles: set[str], wall_s: float) -> dict[str, dict]:
    """Wait for the reports of all cells. Raises SandboxError if a cell could not be built, or no report comes."""
    ended: dict[str, dict] = {}
    timeout_s = (1 + MAX_WAIT_FACTOR) * wall_s + GRACE_S
    while ended.keys() != roles:
        message = server.receive(timeout_s)
        if not message:
            raise SandboxError(f"the sandbox's server is gone, or did not answer within {timeout_s:g} s")
        report = json.loads(message)
        if "error" in report:
            raise SandboxError(f"no cell could be built: {report['error']}")
        ended[report["role"]] = report
    return ended


def _read(ended: dict, out: BinaryIO, err: BinaryIO, limits: Limits) -> ProgramResult:
    # The kernel counts CPU time against the limit in ticks. Where the machine, or its host, is busy, a tick may count
    # for far more than the process had of it, and far more than the reported time.
    late = ended["timeout"] or (ended["code"] == -9 and ended["cpu_s"] >= 0.25 * math.ceil(limits.cpu_s))
    # At places of our own: the program has moved the one that it shares with us.
    size = os.fstat(err.fileno()).st_size
    errors = os.pread(err.fileno(), MAX_ERROR_CHARS, max(size - MAX_ERROR_CHARS, 0)).decode(errors="replace")
    output = os.pread(out.fileno(), limits.output_mb << 20, 0).decode(errors="replace")
    return ProgramResult(ended["code"], late, output, errors, ended["cpu_s"])


def _outcomes(judged: ProgramResult) -> list[tuple[str, str, str]]:
    """Parse the tester's report. An incomplete one means that the tester exceeded its time or memory."""
    lines = [json.loads(line) for line in judged.output.splitlines() if line.endswith("]")]
    if lines and lines[-1][0] == "end":
        return _by_test(lines[:-1])
    if judged.timeout:
        return [*_by_test(lines), ("gone", "", "")]
    raise SandboxError(f"the tests ended with status {judged.status}: {judged.errors[-200:]}")


def _by_test(lines: list[list]) -> list[tuple[str, str, str]]:
    """One outcome for each test: the last of an assert that ran several times."""
    found = {count if place is None else f"assert {place}": line for count, (*line, place) in enumerate(lines)}
    return list(map(tuple, found.values()))


def find_container(allow_none: bool = False) -> bool:
    """Run one program, to see whether programs run in a container here. Raises ConfigError if none works; with
    `allow_none`, if they do not run without one either."""
    why: object = "it needs Linux on x86_64 or aarch64"
    if sys.platform.startswith("linux") and platform.machine() in ("x86_64", "aarch64"):
        for contained in (True, False) if allow_none else (True,):
            try:
                with closing(Server(contained)) as server:
                    run_script(server, "print(1)", "", Limits())
                return contained
            except (OSError, SandboxError) as error:
                why = error
    raise ConfigError(
        f"reward.kind=code or environment.kind=python: no container for untrusted programs works here ({why}). Allow "
        "user namespaces, or set without_container=true there: model-written code can then read this machine's files"
    )


class Sandbox:
    """A pool of `workers` servers, each of which runs one program at a time. If a server fails, it is replaced and the
    job runs again. Without a container only if none works here and `allow_none` is true; else raises ConfigError."""

    def __init__(self, workers: int = 2, allow_none: bool = False):
        self.contained = find_container(allow_none)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="sandbox")
        self._idle: SimpleQueue[Server | None] = SimpleQueue()
        for _ in range(workers):
            self._idle.put(None)

    def map(self, work, jobs: list) -> list:
        """Return `work(server, job)` for each job, in their order, or a SandboxError if it failed twice."""
        return list(self._threads.map(lambda job: self._run(work, job), jobs))

    def _run(self, work, job) -> Any:
        server = self._idle.get()
        try:
            for attempt in (1, 2):
                try:
                    server = server or Server(self.contained)
                    return work(server, job)
                except Exception as error:  # a failure of the sandbox, not of the program
                    if server is not None:
                        server.close()
                    server = None
                    if attempt == 2:
                        return error if isinstance(error, SandboxError) else SandboxError(repr(error))
        finally:
            self._idle.put(server)

    def close(self) -> None:
        """End all processes. May be called twice."""
        self._threads.shutdown()
        while not self._idle.empty():
            server = self._idle.get()
            if server is not None:
                server.close()
