"""The protocol of a reward, which scores responses."""

import math
from dataclasses import replace
from typing import Protocol

from megatron_rft.records import Prompt, Score
from megatron_rft.utils.errors import RunFailed


class Reward(Protocol):
    """Calls come from one thread. If the grader fails twice, it returns Score(error=...), never a reward of 0."""

    maximum: float  # no reward is above it; infinity where there is no bound. Such a response cannot be improved

    def __call__(self, prompts: list[Prompt], texts: list[str]) -> list[Score]:
        """Return one score per (prompt, text), in order. `texts` are decoded responses without special tokens."""
        ...

    def answer(self, prompt: Prompt, text: str) -> str | None:
        """Return the response's answer, for majority votes; None if it has none."""
        return None

    def close(self) -> None:
        """End all processes. May be called twice."""


def finite(score: Score, on_nonfinite: str, when: str, prompt: Prompt, sample: int, text: str) -> Score:
    """Return `score`, or one with an error if its reward is NaN or infinite: that would make every mean NaN.

    Raises:
        RunFailed: `on_nonfinite` (reward.on_nonfinite) is "stop".
    """
    if score.error is not None or math.isfinite(score.reward + score.shaping):
        return score
    what = f"the reward is {score.reward:g}" + (f", its shaping {score.shaping:g}" if score.shaping else "")
    if on_nonfinite == "stop":
        raise RunFailed(
            f"{when}: {what} on response {sample} to problem {prompt.index} ({prompt.text[:80]!r}), which begins "
            f"{text[:80]!r}. A reward must be finite; reward.on_nonfinite=drop leaves such responses out"
        )
    return replace(score, reward=0.0, shaping=0.0, error=what)
