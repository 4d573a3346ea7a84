"""The interface of a reward, which scores responses."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron_rft.responses import Prompt, Response, Score
from megatron_rft.utils.errors import RunFailed


class Reward(ABC):
    """Calls come from one thread. If the grader fails twice, it returns Score(error=...), never a reward of 0."""

    maximum: float  # no reward is above it; infinity where there is no bound. Such a response cannot be improved
    # What to do with a response whose grader failed, and with a reward that is NaN or infinite. "drop": leave it out of
    # the batch and of the statistics of rewards, and count it. "stop": end the run.
    on_error = "drop"
    max_error_share = 0.5  # of a step's responses that "drop" may leave out; above it the run ends
    on_nonfinite = "stop"

    @abstractmethod
    def __call__(self, prompts: Sequence[Prompt], texts: list[str]) -> list[Score]:
        """Return one score per (prompt, text), in order. `texts` are decoded responses without special tokens."""

    def begin(self, prompts: Sequence[Prompt], texts: list[str]) -> Callable[[], list[Score]]:
        """Start to grade. Returns a function that waits for the scores, from any thread."""
        scores = self(prompts, texts)
        return lambda: scores

    def answer(self, prompt: Prompt, text: str) -> str | None:
        """Return the response's answer, for majority votes; None if it has none."""
        return None

    def close(self) -> None:
        """End all processes. May be called twice."""


class NoReward(Reward):
    """Gives every response 0, for algorithms that learn without rewards."""

    maximum = 0.0

    def __call__(self, prompts: Sequence[Prompt], texts: list[str]) -> list[Score]:
        return [Score(0.0)] * len(texts)


def scored(
    reward: Reward, prompts: Sequence[Prompt], texts: list[str], responses: Sequence[Response]
) -> Callable[[], list[Score]]:
    """Start to grade. Returns a function that waits for the environments' scores and, of responses without one, the
    reward's, with the rewards of turns added."""
    missing = [number for number, response in enumerate(responses) if response.score is None]
    wait = reward.begin([prompts[i] for i in missing], [texts[i] for i in missing]) if missing else list

    def scores() -> list[Score]:
        found = dict(zip(missing, wait(), strict=True))
        return [each.total(found[i] if each.score is None else each.score) for i, each in enumerate(responses)]

    return scores


def check_share(errors: Sequence[tuple[Prompt, str]], count: int, reward: Reward, when: str) -> None:
    """Check that not too many of `count` responses have no score. `errors`: the problem and the reason of each.

    Raises:
        RunFailed: some have none and reward.on_error is "stop", or more than reward.max_error_share, or all.
    """
    share = 0.0 if reward.on_error == "stop" else reward.max_error_share
    if len(errors) <= min(share * count, count - 1):
        return
    prompt, reason = errors[0]
    option = "reward.on_error=stop" if reward.on_error == "stop" else f"reward.max_error_share={share:g}"
    raise RunFailed(
        f"{when}: the grader failed on {len(errors)} of {count} responses ({option}), first on problem {prompt.index} "
        f"({prompt.text[:80]!r}): {reason}"
    )


def finite(score: Score, reward: Reward, when: str, prompt: Prompt, sample: int, text: str) -> Score:
    """Return `score`, or one with an error if its reward is NaN or infinite: that would make every mean NaN.

    Raises:
        RunFailed: `reward.on_nonfinite` is "stop".
    """
    if score.error is not None or math.isfinite(score.reward + score.shaping):
        return score
    what = f"the reward is {score.reward:g}" + (f", its shaping {score.shaping:g}" if score.shaping else "")
    if reward.on_nonfinite == "stop":
        raise RunFailed(
            f"{when}: {what} on response {sample} to problem {prompt.index} ({prompt.text[:80]!r}), which begins "
            f"{text[:80]!r}. A reward must be finite; reward.on_nonfinite=drop leaves such responses out"
        )
    return replace(score, reward=0.0, shaping=0.0, error=what)
