"""The interface of a reward, which scores responses."""

from collections.abc import Callable, Sequence

from megatron_rft.responses import Prompt, Response, Score
from megatron_rft.utils.errors import RunFailed


class Reward:
    """Defines __call__ or `begin`. Calls come from one thread. If the grader fails twice, it returns Score(error=...),
    never a reward of 0."""

    maximum: float  # no reward is above it; infinity where there is no bound. Such a response cannot be improved
    # The share of a step's responses on which the grader may fail; above it the run ends. They are counted, and
    # left out of the batch and of the statistics of rewards.
    max_error_share = 0.5

    def __call__(self, prompts: Sequence[Prompt], texts: list[str]) -> list[Score]:
        """Return one score per (prompt, text), in order. `texts` are decoded responses without special tokens."""
        return self.begin(prompts, texts)()

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


def verdict(right: bool, reason: str) -> Score:
    """Return the score of a verifier that says right or wrong: 1 or 0."""
    return Score(float(right), reason, correct=right)


def without_thoughts(text: str) -> str:
    """Return what follows a response's thoughts, up to a thought that does not end."""
    return text.rpartition("</think>")[2].partition("<think>")[0]


def with_thought(prompt: Prompt, text: str) -> str:
    """Return a response with the beginning of the thought that the chat template has opened in its prompt."""
    return f"<think>{text}" if prompt.opened and not text.lstrip().startswith("<think>") else text


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
        RunFailed: more than reward.max_error_share have none, or all.
    """
    if len(errors) > min(reward.max_error_share * count, count - 1):
        prompt, reason = errors[0]
        option = f"reward.max_error_share={reward.max_error_share:g}"
        first = f"first on problem {prompt.index} ({prompt.text[:80]!r}): {reason}"
        raise RunFailed(f"{when}: the grader failed on {len(errors)} of {count} responses ({option}), {first}")


def check_finite(score: Score, when: str, prompt: Prompt, sample: int, text: str) -> None:
    """Raises RunFailed if a reward is NaN or infinite, in fp32: that would make every mean NaN."""
    if score.error is None and not score.usable:
        what = f"the reward is {score.reward:g}" + (f", its shaping {score.shaping:g}" if score.shaping else "")
        raise RunFailed(
            f"{when}: {what} on response {sample} to problem {prompt.index} ({prompt.text[:80]!r}), which begins "
            f"{text[:80]!r}. A reward must be finite, in fp32 too; Score(error=...) leaves a response out"
        )
