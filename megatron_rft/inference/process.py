"""Runs any engine in a separate process, behind the same protocol, and monitors that process.

When the process dies or makes no progress, calls raise `EngineLost`; `start` then starts a new one without weights. The
process ends with the one that started it.
"""

import contextlib
import itertools
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from multiprocessing.connection import Pipe
from pathlib import Path

import torch
from torch import Tensor

from megatron_rft.inference.acceptance import joined
from megatron_rft.inference.engine import Engine, EngineLost, Group, Request, Sampling
from megatron_rft.inference.pool import Member
from megatron_rft.inference.transport.buckets import BUCKET_BYTES, Buckets
from megatron_rft.inference.transport.shared_memory import host_memory, local_gpu, shared, slots_of
from megatron_rft.utils.errors import RunFailed
from megatron_rft.utils.position import here
from megatron_rft.utils.processes import start_helper

LAST_LINES = 15  # of the log in an error message
EXIT_TIMEOUT_S = 5.0


class EngineProcess(Member):
    """`build` creates the engine in the other process. It is pickled: a module's function, or a partial of one."""

    def __init__(
        self,
        build: Callable[[], Engine],
        name: str,
        log: Path,
        start_timeout_s: float = 600.0,
        silence_timeout_s: float = 300.0,
        environment: dict[str, str] | None = None,
    ):
        """`log`: the file for the output of the process. `silence_timeout_s`: seconds without progress on a call after
        which the process counts as hung."""
        self.build, self.name, self.log = build, name, log
        self.start_timeout_s, self.silence_timeout_s = start_timeout_s, silence_timeout_s
        self.environment = environment or {}
        self.process: subprocess.Popen | None = None
        self.transport = ""  # how weights are sent, for the log; set when the process has started
        self._on_gpu: Tensor | None = None  # the buckets, if they are in GPU memory
        self._statistics: list[dict[str, float]] = []  # since the last call of `statistics`
        self._jobs = itertools.count()
        self._sending, self._ending = threading.Lock(), threading.RLock()
        self.start()

    def start(self) -> None:
        """Start a new process, without weights, in place of a lost one.

        Raises:
            RunFailed: the process ended, or was not ready in time. The message has the last lines of its log.
        """
        self._kill()
        self._memory = host_memory()
        self._connection, theirs = Pipe()
        with theirs:
            inherited = (theirs.fileno(), self._memory.fileno())
            command = [sys.executable, "-m", "megatron_rft.inference.process_worker", *map(str, inherited)]
            environment = os.environ | self.environment
            self.process = start_helper(command, log=self.log, env=environment, pass_fds=inherited)
        self._groups: dict[int, queue.Queue] = {}  # of each open iterator of `generate`, by its job
        self._replies = queue.Queue()
        self._last_message = self._last_progress = time.monotonic()
        self._done = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self._send("build", self.build)
            self.dtype, gpus, self.joins = self._reply(self.start_timeout_s)
            self._place_buckets(gpus)
        except BaseException as error:
            self._kill()  # it may live, without an engine
            if not isinstance(error, EngineLost):
                raise
            raise RunFailed(f"{error}. It was starting; its log ends:\n{last_lines(self.log)}") from None

    def _place_buckets(self, gpus: list[str]) -> None:
        """Put the buckets into this rank's GPU memory if the process sees that GPU (`gpus`), else into host memory."""
        self._buckets, self.transport = Buckets(slots_of(self._memory.fileno())), "shared host memory"
        if local_gpu() not in gpus:
            return
        try:
            if self._on_gpu is None:  # reused for the next process: CUDA never frees memory that a lost one had opened
                self._on_gpu = torch.empty(2, BUCKET_BYTES, dtype=torch.uint8, device="cuda")
            self._send("open", *shared(self._on_gpu))
            self._reply()
        except EngineLost:
            raise
        except RuntimeError as error:  # some systems do not let processes share GPU memory
            self.transport += f" (no CUDA IPC: {error})"
        else:
            self._buckets, self.transport = Buckets(self._on_gpu), "CUDA IPC"

    # ---- the protocol

    def generate(self, requests: list[Request], sampling: Sampling) -> Iterator[Group]:
        if not requests:
            return
        job, answers = next(self._jobs), queue.Queue()
        requests = [replace(request, problem=request.problem and request.problem.shown) for request in requests]
        self._groups[job] = answers
        try:
            self._send("generate", job, requests, sampling)
            while (message := self._next(answers, self.silence_timeout_s))[0] == "group":
                yield message[1]
        finally:
            self._groups.pop(job, None)  # a restart has begun others
        _, error, statistics = message
        self._statistics.append(statistics)
        if error is not None:
            raise error

    def statistics(self) -> dict[str, float]:
        self._statistics, since = [], self._statistics
        return joined(since)

    def load_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> None:
        self._send("load", version)
        self._buckets.send(stream, lambda full: self._send("full", full), self._reply)
        self._send("loaded")
        self._reply()

    def checksums(self) -> dict[str, int]:
        self._send("checksums")
        return self._reply()

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(EngineLost, subprocess.TimeoutExpired):
                self._send("close")
                self.process.wait(EXIT_TIMEOUT_S)
        self._kill()

    # ---- messages

    def _send(self, *message) -> None:
        self._last_progress = max(self._last_progress, time.monotonic())  # an idle process makes no progress
        try:
            with self._sending:
                self._connection.send(message)
        except OSError:
            raise self._lost() from None

    def _reply(self, timeout_s: float | None = None):
        name, value = self._next(self._replies, timeout_s or self.silence_timeout_s)
        if name == "failed":
            raise value
        return value

    def _next(self, messages: queue.Queue, timeout_s: float) -> tuple:
        """Wait for the next message. Raises EngineLost if the process has ended or hangs."""
        begun = time.monotonic()
        while True:
            try:
                message = messages.get(timeout=min(1.0, timeout_s / 4))
            except queue.Empty:
                if time.monotonic() - max(begun, self._last_progress) > timeout_s:
                    silent = time.monotonic() - self._last_message > timeout_s / 2
                    self._kill()
                    what = "is silent" if silent else "gets nothing done"
                    raise EngineLost(f"{self.name} {what} for {timeout_s:g} s") from None
                continue
            if message is None:
                messages.put(None)
                raise self._lost()
            return message

    def _read(self) -> None:
        """Sort messages into their queues until the process ends; then append None to all."""
        try:
            while True:
                name, *rest = self._connection.recv()
                self._last_message = time.monotonic()
                if name == "beat":
                    if rest[0] != self._done:
                        here.move()
                        self._done, self._last_progress = rest[0], self._last_message
                    continue
                self._last_progress = self._last_message
                if name in ("group", "end"):
                    if (answers := self._groups.get(rest[0])) is not None:  # else its iterator was not read to its end
                        answers.put((name, *rest[1:]))
                else:
                    self._replies.put((name, rest[0] if rest else None))
        except (EOFError, OSError):
            for each in (*self._groups.values(), self._replies):
                each.put(None)

    # ---- loss of the process

    def _lost(self) -> EngineLost:
        with self._ending:
            if self.process is None:
                return EngineLost(f"{self.name} was stopped")
            try:
                status = self.process.wait(EXIT_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._kill()
                return EngineLost(f"{self.name} closed its connection")
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return EngineLost(f"{self.name} {how}")

    def _kill(self) -> None:
        """Kill the whole session of the process, since an engine may have workers."""
        with self._ending:
            if self.process is None:
                return
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None
            self._disconnect()
            self._memory.close()

    def _disconnect(self) -> None:
        """Close the connection after its reader and writers have stopped, so that its descriptor is free for reuse."""
        with socket.socket(fileno=os.dup(self._connection.fileno())) as line, contextlib.suppress(OSError):
            line.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        with self._sending:
            self._connection.close()


def last_lines(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    return "\n".join(lines[-LAST_LINES:]) or "(empty)"
