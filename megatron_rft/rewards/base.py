"""The protocol of a reward: one score per text."""

from typing import Protocol

from megatron_rft.records import Prompt, Score


class Reward(Protocol):
    """Calls come from one thread. A grader that fails is asked again, and then gives Score(error=...), never a 0."""

    maximum: float  # no reward is above it; infinity where there is no bound. Such a response cannot be improved

    def __call__(self, prompts: list[Prompt], texts: list[str]) -> list[Score]:
        """One score per (prompt, text), in order. `texts` are decoded responses without special tokens."""
        ...

    def answer(self, prompt: Prompt, text: str) -> str | None:
        """The answer that the response is graded by, for majority votes; None where it gives none."""
        ...

    def close(self) -> None:
        """Leave no process behind. May be called twice."""
        ...
