"""Uses a function of the user as a reward: of one prompt and text, or of lists of them."""

import inspect
import json
import math
from collections.abc import Callable, Sized
from dataclasses import asdict
from typing import Any

from megatron_rft.responses import Prompt, Score, number
from megatron_rft.rewards.base import Reward
from megatron_rft.utils import user_code
from megatron_rft.utils.errors import CodeError, ConfigError

OPTION = "reward.function"
ATTEMPTS = 2


class UserReward(Reward):
    """`function(prompt, text)` returns a number or a `Score`; `function(prompts, texts)` a list of them. An exception
    is an error of the grader, not a reward."""

    def __init__(self, function: str, maximum: float | None = None):
        self.name, self.function = function, user_code.load(function, OPTION)
        self.maximum = math.inf if maximum is None else maximum
        if any(map(inspect.iscoroutinefunction, (self.function, type(self.function).__call__))):
            raise ConfigError(
                f"{OPTION}: {function} is async, and nothing awaits it. A function of lists (prompts, texts) can call "
                "asyncio.run itself and wait for all responses at once"
            )
        try:
            signature = inspect.signature(self.function)
            signature.bind(None, "")
            self.takes_lists = next(iter(signature.parameters), "") == "prompts"
        except TypeError as error:
            raise ConfigError(
                f"{OPTION}: {function} cannot be called with (prompt, text): {error}. It takes a Prompt and the "
                "response's text, and gives a number or a Score"
            ) from None

    def __call__(self, prompts: list[Prompt], texts: list[str]) -> list[Score]:
        if not self.takes_lists:
            return [self._score(self._called(prompt, text)) for prompt, text in zip(prompts, texts, strict=True)]
        results = self._called(prompts, texts)
        if isinstance(results, Score) and results.error is not None:
            return [results] * len(texts)
        if not isinstance(results, Sized) or len(results) != len(texts):
            fix = f"return a list of {len(texts)} numbers or Scores, one for each response"
            raise user_code.broken(self.function, results, fix)
        return [self._score(result) for result in results]

    def _called(self, *arguments: Any) -> Any:
        """Return the function's result, or a score with what it raised as the error."""
        for _ in range(ATTEMPTS):
            try:
                return self.function(*arguments)
            except CodeError:
                raise
            except Exception as error:
                failed = Score(0.0, error=f"{self.name}: {type(error).__name__}: {error}")
        return failed

    def _score(self, result: Any) -> Score:
        return Score(**checked_score(result, self.function))


def checked_score(result: Any, function: Callable[..., Any]) -> dict[str, Any]:
    """The fields of the `Score` or number that a function returned, ready for JSON. Raises CodeError."""
    try:
        score = result if isinstance(result, Score) else Score(number(result))
        words = json.dumps(asdict(score), ensure_ascii=False, default=_plain)
        words.encode()
    except UnicodeEncodeError:
        raise user_code.broken(function, result, user_code.SURROGATE) from None
    except (TypeError, ValueError):
        fix = "return a number or a Score; its reason is a text, its details are numbers, texts, lists and dicts"
        raise user_code.broken(function, result, fix) from None
    return json.loads(words)


def _plain(value: Any) -> Any:
    """numpy's numbers and arrays, and tensors, as Python's."""
    if not hasattr(value, "tolist"):
        raise TypeError(value)
    return value.tolist()
