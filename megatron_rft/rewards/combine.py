"""Combines rewards: weighted sums, and a verifier for each row."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from megatron_rft.responses import Prompt, Score
from megatron_rft.rewards.base import Reward
from megatron_rft.utils.errors import DataError


@dataclass(frozen=True)
class Term:
    """One term of a sum. `shaping`: it counts in training, but not in the verifier's score."""

    name: str
    reward: Reward
    weight: float = 1.0
    shaping: bool = False


class SumReward(Reward):
    """Gives the sum of weight * reward. A response is right if all verifiers with a verdict say so. An error of one
    part is an error of the sum."""

    def __init__(self, parts: list[Term]):
        self.parts = parts
        judging = [part for part in parts if not part.shaping]
        bounded = all(part.weight >= 0 for part in judging)  # rewards have no stated lower bound
        self.maximum = sum(part.weight * part.reward.maximum for part in judging) if bounded else math.inf

    def begin(self, prompts: list[Prompt], texts: list[str]) -> Callable[[], list[Score]]:
        columns = [part.reward.begin(prompts, texts) for part in self.parts]
        return lambda: [self._sum(row) for row in zip(*(wait() for wait in columns), strict=True)]

    def _sum(self, scores: tuple[Score, ...]) -> Score:
        terms = list(zip(self.parts, scores, strict=True))
        errors = [f"{part.name}: {score.error}" for part, score in terms if score.error is not None]
        if errors:
            return Score(0.0, error="; ".join(errors))
        judged = [score.correct for part, score in terms if not part.shaping and score.correct is not None]
        return Score(
            reward=sum(part.weight * score.reward for part, score in terms if not part.shaping),
            reason="\n".join(f"{part.name}: {score.reason}" for part, score in terms if score.reason),
            correct=all(judged) if judged else None,
            shaping=sum(part.weight * score.reward for part, score in terms if part.shaping)
            + sum(part.weight * score.shaping for part, score in terms),
            details={part.name: {"reward": score.reward, **score.details} for part, score in terms},
        )

    def answer(self, prompt: Prompt, text: str) -> str | None:
        return next((found for part in self.parts if (found := part.reward.answer(prompt, text)) is not None), None)

    def close(self) -> None:
        for part in self.parts:
            part.reward.close()


class ByRowReward(Reward):
    """Uses the verifier that the row's field `field` names, one of `kinds`."""

    def __init__(self, field: str, kinds: dict[str, Reward]):
        self.field, self.kinds = field, kinds
        self.maximum = max(reward.maximum for reward in kinds.values())

    def begin(self, prompts: list[Prompt], texts: list[str]) -> Callable[[], list[Score]]:
        places: dict[str, list[int]] = {}
        for place, prompt in enumerate(prompts):
            places.setdefault(self._kind(prompt), []).append(place)
        waits = [
            (chosen, self.kinds[kind].begin([prompts[i] for i in chosen], [texts[i] for i in chosen]))
            for kind, chosen in places.items()
        ]

        def scores() -> list[Score]:
            found = {place: score for chosen, wait in waits for place, score in zip(chosen, wait(), strict=True)}
            return [found[place] for place in range(len(prompts))]

        return scores

    def _kind(self, prompt: Prompt) -> str:
        kind = prompt.fields.get(self.field)
        if not isinstance(kind, str) or kind not in self.kinds:
            raise DataError(
                f"reward.field: row {prompt.index + 1} has {self.field}={kind!r}; reward.kinds has "
                f"{', '.join(self.kinds)}"
            )
        return kind

    def answer(self, prompt: Prompt, text: str) -> str | None:
        return self.kinds[self._kind(prompt)].answer(prompt, text)

    def close(self) -> None:
        for each in self.kinds.values():
            each.close()
