"""The main program of a process that holds the environments of some episodes.

    python -m megatron_rft.environments.worker SOCKET OPTIONS

The arguments are a file descriptor and the recipe's section as JSON.
Messages are {"call": "reset" | "step" | "end", "episode": number, ...}, or {"call": "grade", ...} for the score of a
program's episode. After an error the episode is gone.
utils/worker_process.py has the form of the answers.
"""

import inspect
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from megatron_rft.environments.base import Environment, Turn, content_of, text_of
from megatron_rft.environments.process import row_of
from megatron_rft.responses import Prompt, number
from megatron_rft.rewards.user_reward import checked_score
from megatron_rft.utils import user_code
from megatron_rft.utils.errors import ConfigError
from megatron_rft.utils.worker_process import failure, serve

LONGEST = 1 << 20  # characters of an answer
MADE_BY = {"tools": "ToolEnvironment", "python": "PythonEnvironment"}
GIVEN = ("row", "folder", "status", "conversation")  # to environment.score
CALLED_WITH = {"__init__": (), "reset": ("prompt", "seed"), "step": ("text",), "score": (), "close": ()}


def maker(kind: str, **options: Any) -> Callable[[], Environment] | None:
    """A function that makes the environment of an episode; of a program the one that grades it. Raises ConfigError if
    its code is not there."""
    if kind == "own":
        return own_class(options["episode"])
    if kind == "program":
        if not (named := options["score"]):
            return None
        grade = user_code.load(named, "environment.score")
        try:
            inspect.signature(grade).bind(*GIVEN)
        except TypeError:
            raise ConfigError(f"environment.score: {named} must be a function ({', '.join(GIVEN)})") from None
        return grade
    from megatron_rft.environments import tools

    made = getattr(tools, MADE_BY[kind])
    return partial(made, **made.shared(**options))


def own_class(named: str) -> type[Environment]:
    found = user_code.load(named, "environment.episode")
    if not (isinstance(found, type) and issubclass(found, Environment)):
        raise ConfigError(f"environment.episode: {named} is no class of megatron_rft.environments.Environment")
    if found.step is Environment.step:
        raise ConfigError(f"environment.episode: {named} has no method `step`, which answers a turn")
    user_code.check_overrides(found, named, "environment.episode")
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

    def answer(self, send: Callable[[dict[str, Any]], None], call: str, episode: int, **arguments: Any) -> None:
        try:
            send({"value": getattr(self, f"_{call}")(episode, **arguments)})
        except BaseException as error:  # also sys.exit, which is the code's own
            self.episodes.pop(episode, None)
            send(failure(error))

    def _reset(self, episode: int, prompt: dict[str, Any], seed: int) -> list | str:
        self.seeds[episode] = seed, 0
        self._seed(episode)
        self.episodes[episode] = environment = self.make()
        said = environment.reset(Prompt(token_ids=(), **prompt), seed) or ""
        return checked_said(said, environment.reset, said)

    def _step(self, episode: int, text: str) -> dict[str, Any]:
        self._seed(episode)
        step = self.episodes[episode].step
        turn = step(text)
        if not isinstance(turn, Turn):
            raise user_code.broken(step, turn, "return a Turn(text, reward=..., done=...)")
        text = checked_said(turn.text, step, turn)
        try:
            reward = number(turn.reward)
        except TypeError:
            reward = math.nan
        if not math.isfinite(reward):
            raise user_code.broken(step, turn, "its reward must be a finite number")
        return {"text": text, "reward": reward, "done": bool(turn.done)}

    def _end(self, episode: int) -> dict[str, Any] | None:
        """Score and close."""
        self._seed(episode)
        environment = self.episodes.pop(episode)
        score = environment.score()
        environment.close()
        return None if score is None else checked_score(score, environment.score)

    def _grade(
        self, episode: int, prompt: dict[str, Any], seed: int, folder: str, status: int, conversation: list[Any]
    ) -> dict[str, Any] | None:
        user_code.seed_generators(f"{seed}/0")
        score = self.make(row_of(Prompt(token_ids=(), **prompt)), Path(folder), status, conversation)
        return None if score is None else checked_score(score, self.make)

    def _seed(self, episode: int) -> None:
        """Seed the global generators from (episode's seed, call), since the order of episodes depends on timing."""
        seed, call = self.seeds[episode]
        self.seeds[episode] = seed, call + 1
        user_code.seed_generators(f"{seed}/{call}")


def checked_said(said: Any, method: Callable[..., Any], returned: Any) -> Any:
    """A text, or a list of messages, of what a method returned; its texts not too long."""
    try:
        if not isinstance(said, str):
            said = [each | {"content": content_of(each["content"])} for each in said]
        json.dumps(said, ensure_ascii=False).encode()
        length = sum(map(len, [said] if isinstance(said, str) else [m["role"] + text_of(m["content"]) for m in said]))
    except UnicodeEncodeError:
        raise user_code.broken(method, returned, user_code.SURROGATE) from None
    except (AttributeError, TypeError, KeyError, ValueError):
        form = 'a text or a list of {"role": ..., "content": text, or a list of texts and images} is needed'
        raise user_code.broken(method, returned, form) from None
    if length > LONGEST:
        raise ValueError(f"{method.__name__} returned {length} characters, and {LONGEST} are allowed")
    return said


if __name__ == "__main__":
    serve(lambda **options: (Host(maker(**options)).answer, None))
