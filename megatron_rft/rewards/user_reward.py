"""Uses a function of the user as a reward: of one prompt and text, or of lists of them."""

import inspect
import math
from collections.abc import Sized
from typing import Any

from megatron_rft.responses import Prompt, Score
from megatron_rft.rewards.base import Reward
from megatron_rft.utils import user_code
from megatron_rft.utils.errors import ConfigError

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
            problem = f"{self.name}: gave {results!r:.80} for {len(texts)} responses, not a list of as many"
            return [Score(0.0, error=problem)] * len(texts)
        return [self._score(result) for result in results]

    def _called(self, *arguments: Any) -> Any:
        """Return the function's result, or a score with what it raised as the error."""
        for _ in range(ATTEMPTS):
            try:
                return self.function(*arguments)
            except Exception as error:
                failed = Score(0.0, error=f"{self.name}: {type(error).__name__}: {error}")
        return failed

    def _score(self, result: Any) -> Score:
        if isinstance(result, Score):
            return result
        try:
            return Score(float(result))
        except (TypeError, ValueError):
            return Score(0.0, error=f"{self.name}: gave {result!r:.80}, which is neither a number nor a Score")
