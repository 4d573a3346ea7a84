"""The main program of a process that holds the environments of some episodes.

    python -m megatron_rft.environments.worker SOCKET OPTIONS

The arguments are a file descriptor and the recipe's section as JSON.
Messages are JSON: {"call": "reset" | "step" | "end", "episode": number, ...}, each answered by {"value": ...} or
{"error": text}. After an error the episode is gone. The first message out is an answer too: whether the class is there.
"""

import contextlib
import dataclasses
import importlib
import inspect
import json
import math
import os
import random
import sys
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from megatron_rft.environments.base import Environment, Turn
from megatron_rft.responses import Prompt, Score
from megatron_rft.utils import user_code
from megatron_rft.utils.errors import ConfigError

LONGEST = 1 << 20  # characters of an answer
MADE_BY = {"tools": "tools:ToolEnvironment", "python": "python:PythonEnvironment"}
CALLED_WITH = {"__init__": (), "reset": ("prompt", "seed"), "step": ("text",), "score": (), "close": ()}


def maker(kind: str, **options: Any) -> Callable[[], Environment]:
    """A function that makes the environment of an episode. Raises ConfigError if its code is not there."""
    if kind == "own":
        return own_class(options["episode"])
    module, _, name = MADE_BY[kind].partition(":")
    made = getattr(importlib.import_module(f"megatron_rft.environments.{module}"), name)
    return partial(made, **made.shared(**options))


def own_class(named: str) -> type[Environment]:
    found = user_code.load(named, "environment.episode")
    if not (isinstance(found, type) and issubclass(found, Environment)):
        raise ConfigError(f"environment.episode: {named} is no class of megatron_rft.environments.Environment")
    if found.step is Environment.step:
        raise ConfigError(f"environment.episode: {named} has no method `step`, which answers a turn")
    for method, given in CALLED_WITH.items():
        signature = inspect.signature(getattr(found, method))
        try:
            signature.bind("self", *given)
        except TypeError:
            called = f"{method}({', '.join(('self', *given))})"
            raise ConfigError(f"environment.episode: {named} must have {called}, not {method}{signature}") from None
    return found


class Host:
    """The environments of this process, by the numbers of their episodes."""

    def __init__(self, make: Callable[[], Environment]):
        self.make, self.episodes, self.seeds = make, {}, {}

    def answer(self, call: str, episode: int, **arguments: Any) -> str:
        try:
            return json.dumps({"value": getattr(self, f"_{call}")(episode, **arguments)})
        except (Exception, SystemExit) as error:
            self.episodes.pop(episode, None)
            where = traceback.extract_tb(error.__traceback__)[-1]
            at = "" if isinstance(error, Refused) else f" ({os.path.basename(where.filename)}, line {where.lineno})"
            return json.dumps({"error": f"{type(error).__name__}: {error}{at}"})

    def _reset(self, episode: int, prompt: dict[str, Any], seed: int) -> list | str:
        self.seeds[episode] = seed, 0
        self._seed(episode)
        self.episodes[episode] = environment = self.make()
        return checked_text(environment.reset(Prompt(token_ids=(), **prompt), seed) or "", "reset")

    def _step(self, episode: int, text: str) -> dict[str, Any]:
        self._seed(episode)
        turn = self.episodes[episode].step(text)
        if not isinstance(turn, Turn):
            raise Refused(f"step returned {turn!r:.80}, which is no Turn")
        checked_text(turn.text, "step")
        if isinstance(turn.reward, bool | int | float) and math.isfinite(turn.reward):
            return {"text": turn.text, "reward": float(turn.reward), "done": bool(turn.done)}
        raise Refused(f"step returned the reward {turn.reward!r:.80}, which is no finite number")

    def _end(self, episode: int) -> dict[str, Any] | None:
        """Score and close."""
        self._seed(episode)
        environment = self.episodes.pop(episode)
        score = environment.score()
        environment.close()
        if isinstance(score, bool | int | float):
            score = Score(float(score))
        if score is not None and not isinstance(score, Score):
            raise Refused(f"score returned {score!r:.80}, which is neither a Score, a number nor None")
        return score and dataclasses.asdict(score)

    def _seed(self, episode: int) -> None:
        """Seed the global generators from (episode's seed, call), since the order of episodes depends on timing."""
        seed, call = self.seeds[episode]
        self.seeds[episode] = seed, call + 1
        random.seed(f"{seed}/{call}")
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(random.getrandbits(32))


class Refused(ValueError):
    """An answer that cannot be used."""


def checked_text(text: Any, call: str) -> Any:
    """A text, or a list of messages; not too long."""
    try:
        length = len(text if isinstance(text, str) else "".join(each["role"] + each["content"] for each in text))
    except (TypeError, KeyError):
        what = f"{call} returned the text {text!r:.80}, which is neither a text nor a list of messages"
        raise Refused(what) from None
    if length > LONGEST:
        raise Refused(f"{call} returned {length} characters, and {LONGEST} are allowed")
    return text


def main(connection: Connection, options: dict[str, Any]) -> None:
    try:
        host = Host(maker(**options))
    except Exception as error:
        what = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        connection.send_bytes(json.dumps({"error": what}).encode())
        return
    connection.send_bytes(b'{"value": null}')
    with contextlib.suppress(EOFError):
        while True:
            connection.send_bytes(host.answer(**json.loads(connection.recv_bytes())).encode())


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])), json.loads(sys.argv[2]))
