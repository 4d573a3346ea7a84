"""No verifier, for algorithms that learn without rewards."""

from collections.abc import Sequence

from megatron_rft.records import Score
from megatron_rft.rewards.base import Reward, Row


class NoReward(Reward):
    """Gives every response 0."""

    maximum = 0.0

    def __call__(self, prompts: Sequence[Row], texts: list[str]) -> list[Score]:
        return [Score(0.0)] * len(texts)
