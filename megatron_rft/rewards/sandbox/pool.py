"""Runs programs on a pool of servers."""

import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from queue import SimpleQueue
from typing import Any

from megatron_rft.rewards.sandbox.launch import SandboxError, Server
from megatron_rft.rewards.sandbox.runner import Limits, run_script


def check(contained: bool = True) -> None:
    """Start a server and run one program. Raises SandboxError if that does not work here."""
    if not sys.platform.startswith("linux") or platform.machine() not in ("x86_64", "aarch64"):
        raise SandboxError("it needs Linux on x86_64 or aarch64")
    try:
        with closing(Server(contained)) as server:
            run_script(server, "print(1)", "", Limits())
    except OSError as error:
        raise SandboxError(str(error)) from None


class Sandbox:
    """A pool of `workers` servers, each of which runs one program at a time. If a server fails, it is replaced and the
    job runs again. Without a container only if none works here and `allow_none` is true; else raises SandboxError."""

    def __init__(self, workers: int = 2, allow_none: bool = False):
        self.contained = True
        try:
            check()
        except SandboxError:
            if not allow_none:
                raise
            check(contained=False)
            self.contained = False
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
