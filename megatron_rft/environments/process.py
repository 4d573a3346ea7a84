"""Runs environments, which are the user's code, in other processes: slow, dead and broken ones cost one episode."""

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

from megatron_rft.responses import Prompt
from megatron_rft.utils.errors import ConfigError
from megatron_rft.utils.processes import end_reaper, start_helper

START_TIMEOUT_S = 120.0  # imports on a busy machine
EXIT_TIMEOUT_S = 10.0  # on a busy machine


class EpisodeFailed(Exception):
    """An environment raised, was late, died, or gave an answer that cannot be used."""


class EnvironmentProcess:
    """One process, started when it is needed and replaced when it is lost. Calls come from its thread."""

    def __init__(self, options: dict[str, Any], timeout_s: float, log: Path):
        self.options, self.timeout_s, self.log = options, timeout_s, log
        self.process: subprocess.Popen | None = None
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="environment")

    def running(self) -> subprocess.Popen:
        """The process, started if there is none. Raises ConfigError if its environments cannot be made."""
        if self.process is not None:
            return self.process
        self.connection, theirs = Pipe()
        with theirs:
            arguments = [str(theirs.fileno()), json.dumps(self.options)]
            command = [sys.executable, "-m", "megatron_rft.environments.worker", *arguments]
            environment = os.environ | {"PYTHONHASHSEED": "0"}
            self.process = process = start_helper(
                command, reap=True, log=self.log, env=environment, pass_fds=(theirs.fileno(),)
            )
        try:
            self.answer(START_TIMEOUT_S)
        except EpisodeFailed as error:
            self.close()
            raise ConfigError(f"environment: {error}") from None
        return process

    def answer(self, timeout_s: float, **message: Any) -> Any:
        """Send a message, if there is one, and return the answer. Raises EpisodeFailed."""
        try:
            if message:
                self.connection.send_bytes(json.dumps(message, default=str).encode())
            if not self.connection.poll(timeout_s):
                self.close()
                limit = "environment.turn_timeout_s" if message else f"when its process started: {self.log}"
                raise EpisodeFailed(f"gave no answer within {timeout_s:g} s ({limit})")
            answer = json.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            raise EpisodeFailed(self._lost()) from None
        if "error" in answer:
            raise EpisodeFailed(answer["error"])
        return answer["value"]

    def _lost(self) -> str:
        try:
            status = self.process.wait(EXIT_TIMEOUT_S)
            how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        except subprocess.TimeoutExpired:
            how = "closed its connection"
        self.close()
        return f"its process {how}; its output is in {self.log}"

    def close(self) -> None:
        """Kill the process, with all that it started."""
        if self.process is not None:
            end_reaper(self.process)
            self.connection.close()
        self.process = None


class EpisodeEnvironment:
    """The environment of one episode, in a process. `calls` has (call, arguments, answer) of each call so far."""

    def __init__(self, number: int, process: EnvironmentProcess):
        self.number, self.process = number, process
        self.calls: list[tuple[str, dict[str, Any], Any]] = []
        self.held_by: subprocess.Popen | None = None

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future:
        """Run `work(*arguments)`, which may `ask`, in the thread of the process."""
        return self.process.thread.submit(work, *arguments)

    def ask(self, call: str, **arguments: Any) -> Any:
        """Make a call. If the process was lost, the environment first hears the earlier calls again.

        Raises:
            EpisodeFailed: the message says why.
        """
        running = self.process.running()
        if self.held_by is not running:
            for earlier, given, answer in self.calls:
                if self._answer(earlier, given) != answer:
                    raise EpisodeFailed(
                        f"answered {earlier} otherwise when the episode was played again: an environment must depend "
                        "on the problem, the seed and the policy's texts alone"
                    )
            self.held_by = running
        self.calls.append((call, arguments, self._answer(call, arguments)))
        return self.calls[-1][2]

    def _answer(self, call: str, arguments: dict[str, Any]) -> Any:
        return self.process.answer(self.process.timeout_s, call=call, episode=self.number, **arguments)


class EnvironmentProcesses:
    """`count` processes; the episodes take turns among them, and each stays in its own."""

    def __init__(self, options: dict[str, Any], count: int, timeout_s: float, log: Path):
        logs = (log.with_name(f"{log.name}_{number}.log") for number in range(count))
        self.members = [EnvironmentProcess(options, timeout_s, each) for each in logs]
        self.numbers = itertools.count()

    def new(self) -> EpisodeEnvironment:
        number = next(self.numbers)
        return EpisodeEnvironment(number, self.members[number % len(self.members)])

    def close(self) -> None:
        for member in self.members:
            member.thread.shutdown(wait=False, cancel_futures=True)
            member.close()


def shown(prompt: Prompt) -> dict[str, Any]:
    """What an environment sees of a problem."""
    return {name: value for name, value in asdict(prompt).items() if name != "token_ids"}
