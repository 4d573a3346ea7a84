"""Uses a function of the user as a reward."""

import inspect
import math

from megatron_rft.records import Prompt, Score
from megatron_rft.rewards.base import Reward
from megatron_rft.utils import user_code
from megatron_rft.utils.errors import ConfigError

OPTION = "reward.function"
ATTEMPTS = 2


class UserReward(Reward):
    """`function(prompt, text)` returns a number or a `Score`. An exception is an error of the grader, not a reward."""

    def __init__(self, function: str, maximum: float | None = None):
        self.name, self.function = function, user_code.load(function, OPTION)
        self.maximum = math.inf if maximum is None else maximum
        if not callable(self.function):
            raise ConfigError(f"{OPTION}: {function} is a {type(self.function).__name__}, not a function")
        try:
            inspect.signature(self.function).bind(None, "")
        except TypeError as error:
            raise ConfigError(
                f"{OPTION}: {function} cannot be called with (prompt, text): {error}. It takes a Prompt and the "
                "response's text, and gives a number or a Score"
            ) from None

    def __call__(self, prompts: list[Prompt], texts: list[str]) -> list[Score]:
        return [self._score(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]

    def _score(self, prompt: Prompt, text: str) -> Score:
        for _ in range(ATTEMPTS):
            try:
                result = self.function(prompt, text)
                break
            except Exception as error:
                problem = f"{self.name}: {type(error).__name__}: {error}"
        else:
            return Score(0.0, error=problem)
        if isinstance(result, Score):
            return result
        try:
            return Score(float(result))
        except (TypeError, ValueError):
            return Score(0.0, error=f"{self.name}: gave {result!r:.80}, which is neither a number nor a Score")
