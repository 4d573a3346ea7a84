"""Runs environments, which are the user's code, in other processes: slow, dead and broken ones cost one episode."""

import itertools
import subprocess
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megatron_rft.responses import Prompt
from megatron_rft.utils.worker_process import CallFailed as EpisodeFailed
from megatron_rft.utils.worker_process import WorkerProcess


class EpisodeEnvironment:
    """The environment of one episode, in a process. `calls` has (call, arguments, answer) of each call so far."""

    def __init__(self, number: int, process: WorkerProcess):
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
            CodeError: what the environment returned can never be used.
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
        return self.process.answer(call=call, episode=self.number, **arguments)


class EnvironmentProcesses:
    """`count` processes; the episodes take turns among them, and each stays in its own."""

    def __init__(self, options: dict[str, Any], count: int, timeout_s: float, log: Path):
        logs = (log.with_name(f"{log.name}_{number}.log") for number in range(count))
        module, about = "megatron_rft.environments.worker", ("environment", "environment.turn_timeout_s")
        self.members = [WorkerProcess(module, options, timeout_s, each, *about) for each in logs]
        self.numbers = itertools.count()

    def new(self) -> EpisodeEnvironment:
        number = next(self.numbers)
        return EpisodeEnvironment(number, self.members[number % len(self.members)])

    def close(self) -> None:
        for member in self.members:
            member.close()


def shown(prompt: Prompt) -> dict[str, Any]:
    """What an environment sees of a problem."""
    prompt = replace(prompt, images=prompt.images and list(prompt.images.sources))
    return {name: value for name, value in asdict(prompt).items() if name != "token_ids"}


def row_of(prompt: Prompt) -> dict[str, Any]:
    """A problem as a program and its score see it."""
    return {**prompt.fields, "index": prompt.index, "question": prompt.question or prompt.text, "answer": prompt.answer}
