"""What a reward is: scores for texts. Which verifiers there are, and how a recipe's `reward` section builds one."""

from typing import Any, Protocol

from megatron_rft.errors import ConfigError, did_you_mean
from megatron_rft.records import Prompt, Score


class Reward(Protocol):
    """Calls come from one thread. A grader that fails gives Score(error=...), never a reward of 0."""

    def __call__(self, prompts: list[Prompt], texts: list[str]) -> list[Score]:
        """One score per (prompt, text), in order. `texts` are decoded responses without special tokens."""
        ...

    def answer(self, text: str) -> str | None:
        """What the response gives as its answer, for majority votes; None where it gives none."""
        ...

    def close(self) -> None:
        """Leave no process behind. May be called twice."""
        ...


def build(config: Any) -> Reward:
    """The reward of a recipe's section: `kind`, `timeout_s`, `workers`."""
    kinds = {"math": _math}
    if config.kind not in kinds:
        raise ConfigError(
            f"reward.kind={config.kind!r}: there is {', '.join(kinds)}.{did_you_mean(config.kind, kinds)}"
        )
    return kinds[config.kind](config)


def _math(config: Any) -> Reward:
    from megatron_rft.rewards.math import MathReward

    return MathReward(timeout_s=config.timeout_s, workers=config.workers)
