"""The section `environment`: what answers the policy between its turns. No torch."""

import os
from typing import Any, ClassVar

from pydantic import Field

from megatron_rft.config.messages import at
from megatron_rft.config.sections import Count, Positive, Section


class Base(Section):
    kind: str
    """own: your class. tools: your functions. python: a sandbox for the policy's programs. program: your program, which
    talks to a chat endpoint."""
    max_turns: Count = 8
    """Turns of the policy in an episode."""
    turn_tokens: Count | None = None
    """Tokens of one turn; an episode ends with a turn that reaches them. rollout.max_response_tokens limits the whole
    episode, with the environment's tokens. None: only that limit."""
    turn_timeout_s: Positive = 30.0
    """Seconds for an answer of the environment. A later one drops the episode."""
    processes: Count = 4
    """Processes of each rank with an engine, in which the environments are. Each answers one episode at a time."""

    roles: ClassVar[tuple[str, ...]] = ("user",)  # of the messages between turns

    @property
    def segments(self) -> int:
        """The most sequences of an episode."""
        return 1

    @property
    def name(self) -> str:
        """For messages."""
        return self.kind

    @property
    def calls(self) -> bool:
        """Whether the policy calls functions."""
        return "tool" in self.roles

    @property
    def code(self) -> list[str]:
        """The user's code that it names, and files of a command."""
        return []

    def own_options(self) -> dict[str, Any]:
        """What the process of an environment gets: the kind and its own options."""
        return {"kind": self.kind} | {k: v for k, v in self.model_dump().items() if k not in Base.model_fields}


class Own(Base, kind="own"):
    episode: str
    """my_file.py:Class (relative to the working directory) or my_module:Class, an `Environment` (docs/agents.md)."""

    @property
    def name(self) -> str:
        return self.episode.rpartition(":")[2]

    @property
    def code(self) -> list[str]:
        return [self.episode]


class Tools(Base, kind="tools"):
    roles = ("tool",)
    functions: list[str] = Field(min_length=1)
    """my_file.py:function or my_module:function: typed Python functions with a docstring that describes each argument.
    The chat template shows them to the policy, and its calls run them."""

    def _check(self):
        names = [each.rpartition(":")[2].partition("@")[0] for each in self.functions]
        for name in names:
            if names.count(name) > 1:
                raise at("functions", f"two functions are called {name!r}, and the policy calls them by their names")

    @property
    def code(self) -> list[str]:
        return self.functions


class Python(Base, kind="python"):
    roles = ("tool",)
    timeout_s: Positive = 5.0
    """Processor seconds of a program; twice that in elapsed time."""
    memory_mb: Count = 1024
    """Address space of a program."""
    without_container: bool = False
    """Run programs even if no container works. They can then read this machine's files."""

    def _check(self):
        if self.turn_timeout_s < 2 * self.timeout_s:
            most = f"a program may take, 2 x {self.timeout_s:g} s"
            raise at("turn_timeout_s", f"{self.turn_timeout_s:g} s is less than {most}")


class Program(Base, kind="program", without=("turn_timeout_s",)):
    command: list[str] = Field(min_length=1)
    """The program and its arguments. A path to a file is relative to the working directory."""
    episode_timeout_s: Positive = 600.0
    """Seconds of an episode: start, run and grading, without the time in which it waits for the policy. A later one is
    dropped."""
    max_segments: Count = 16
    """Sequences of an episode. A request that continues no known messages begins one."""
    score: str | None = None
    """my_file.py:function or my_module:function, `grade(row, folder, status, conversation)` -> a `Score` or a number
    (docs/agents.md). None: the recipe's reward judges the last answer."""
    programs: Count = 256
    """The most programs of an engine that run at the same time."""
    host: str = "127.0.0.1"
    """The address of this machine at which the endpoint listens. Any other one opens it to other machines."""

    @property
    def name(self) -> str:
        return " ".join(self.command)

    @property
    def segments(self) -> int:
        return min(self.max_segments, self.max_turns)

    @property
    def code(self) -> list[str]:
        return [*filter(os.path.isfile, self.command), *([self.score] if self.score else [])]


AnyEnvironment = Own | Tools | Python | Program
ENVIRONMENTS = {"own": Own, "tools": Tools, "python": Python, "program": Program}  # by `environment.kind`
