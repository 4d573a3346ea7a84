"""The protocol of a reward, which scores responses."""

from typing import Protocol

from megatron_rft.records import Prompt, Score


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
