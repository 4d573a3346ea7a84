"""Runs environments, which are the user's code, in other processes: slow, dead and broken ones cost one episode."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

import megatron_rft
from megatron_rft.responses import Prompt
from megatron_rft.utils.errors import ConfigError
from megatron_rft.utils.processes import start_helper

START_TIMEOUT_S = 120.0  # imports on a busy machine
ROOT = Path(megatron_rft.__file__).parents[1]


class EpisodeFailed(Exception):
    """An environment raised, was late, died, or gave an answer that cannot be used."""


@dataclass
class Played:
    """An episode as its environment saw it: what is needed to play it again. `calls`: (call, arguments, answer)."""

    number: int
    prompt: Prompt
    seed: int
    calls: list[tuple[str, dict[str, Any], Any]] = field(default_factory=list)


class EnvironmentProcess:
    """One process, started at the first call and replaced when it is lost. Calls come from one thread."""

    def __init__(self, options: dict[str, Any], timeout_s: float, log: Path):
        self.options, self.timeout_s, self.log = options, timeout_s, log
        self.process: subprocess.Popen | None = None
        self.holds: set[int] = set()  # numbers of the episodes whose environments are in the process
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="environment")

    def ask(self, played: Played, call: str, **arguments: Any) -> Any:
        """Make a call of an episode's environment. If its process was lost, it first hears the recorded calls again.

        Raises:
            EpisodeFailed: the message says why.
        """
        if self.process is None:
            self._start()
        if played.number not in self.holds:
            for earlier, given, answer in played.calls:
                if self._exchange(played.number, earlier, given) != answer:
                    raise EpisodeFailed(
                        f"answered {earlier} otherwise when the episode was played again: an environment must depend "
                        "on the problem, the seed and the policy's texts alone"
                    )
            self.holds.add(played.number)
        answer = self._exchange(played.number, call, arguments)
        played.calls.append((call, arguments, answer))
        if call == "end":
            self.holds.discard(played.number)
        return answer

    def _start(self) -> None:
        connection, theirs = Pipe()
        command = [sys.executable, "-m", "megatron_rft.environments.worker", str(theirs.fileno())]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with theirs, self.log.open("ab") as log:
            self.process = start_helper(
                [*command, json.dumps(self.options)],
                env=os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": "0"},
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.connection, self.holds = connection, set()
        try:
            self._receive(START_TIMEOUT_S)
        except EpisodeFailed as error:
            self.close()
            raise ConfigError(f"environment: {error}") from None

    def _exchange(self, number: int, call: str, arguments: dict[str, Any]) -> Any:
        message = json.dumps({"call": call, "episode": number, **arguments}, default=str).encode()
        try:
            self.connection.send_bytes(message)
        except OSError:
            raise EpisodeFailed(self._lost()) from None
        return self._receive(self.timeout_s)

    def _receive(self, timeout_s: float) -> Any:
        try:
            if not self.connection.poll(timeout_s):
                self.close()
                raise EpisodeFailed(f"gave no answer within {timeout_s:g} s (environment.turn_timeout_s)")
            answer = json.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            raise EpisodeFailed(self._lost()) from None
        if "error" in answer:
            raise EpisodeFailed(answer["error"])
        return answer["value"]

    def _lost(self) -> str:
        status = self.process.wait()
        self.close()
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return f"its process {how}; its output is in {self.log}"

    def close(self) -> None:
        """Kill the process, with all that it started."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.connection.close()
        self.process, self.holds = None, set()


class EnvironmentProcesses:
    """`count` processes; the episodes take turns among them, and each stays in its own."""

    def __init__(self, options: dict[str, Any], count: int, timeout_s: float, log: Path):
        logs = (log.with_name(f"{log.name}_{number}.log") for number in range(count))
        self.members = [EnvironmentProcess(options, timeout_s, each) for each in logs]
        self.numbers = itertools.count()

    def new(self, prompt: Prompt, seed: int) -> Played:
        return Played(next(self.numbers), prompt, seed)

    def submit(self, played: Played, work: Callable[[Callable[..., Any]], Any]) -> Future:
        """Run `work(ask)` in the thread of the episode's process, where `ask(call, ...)` asks its environment."""
        member = self.members[played.number % len(self.members)]
        return member.thread.submit(lambda: work(lambda call, **arguments: member.ask(played, call, **arguments)))

    def close(self) -> None:
        for member in self.members:
            member.thread.shutdown(wait=False, cancel_futures=True)
            member.close()


def shown(prompt: Prompt) -> dict[str, Any]:
    """What an environment sees of a problem."""
    fields = asdict(prompt)
    del fields["token_ids"]
    return fields
