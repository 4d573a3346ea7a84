"""A problem, a response to it, and its score: what the processes of environments and graders share. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Prompt:
    """One problem. `index` is its row in the data set: stable over epochs, part of every sampling seed."""

    index: int
    token_ids: tuple[int, ...]
    text: str
    answer: str
    fields: dict[str, Any] = field(default_factory=dict)  # the rest of the row: level, subject, tests ...
    question: str = ""  # `text` before the chat template; prompts with feedback or for a refiner are made from it


@dataclass(frozen=True)
class Response:
    """One sampled response. `token_ids` end with the stop token when `finish_reason` is "stop"."""

    token_ids: Sequence[int]  # a tuple; an array behind the gathering of all ranks
    logprobs: Sequence[float]  # under the sampling distribution, one per token of token_ids
    finish_reason: str  # "stop" | "length" | "abort"
    weight_version: int  # of the weights that sampled its first token
    supports: tuple[tuple[int, ...], ...] = ()  # truncated sampling: the ids it kept for each token; empty: all
    # (first, end, reward) of each turn that the policy wrote, in an episode; the tokens between turns are the
    # environment's. (): the policy wrote everything.
    turns: tuple[tuple[int, int, float], ...] = ()
    prompt_ids: tuple[int, ...] | None = None  # if the environment's first messages follow the problem's prompt
    said: tuple[str, ...] = ()  # the environment's texts
    score: "Score | None" = None  # the environment's; None: the recipe's reward judges the last turn
    # [fed tokens, layers with experts, experts per token], if Sampling.routes asks for them: the experts that the
    # engine used, for the prompt and all response tokens but the last. Behind the gathering of all ranks a key.
    routes: Any = None

    @property
    def length(self) -> int:
        """The number of tokens that the policy wrote."""
        return sum(end - first for first, end, _ in self.turns) if self.turns else len(self.token_ids)

    @property
    def last_turn(self) -> tuple[int, ...]:
        """What a verifier judges."""
        return self.token_ids[slice(*self.turns[-1][:2])] if self.turns else self.token_ids

    def total(self, score: "Score") -> "Score":
        """The score with the rewards of the turns added. Whether it is correct stays the score's verdict."""
        rewards = [reward for *_, reward in self.turns if reward]
        if not rewards or score.error is not None:
            return score
        return replace(score, reward=score.reward + sum(rewards), correct=score.right)


@dataclass(frozen=True)
class Score:
    """A verifier's judgement of one response. A failure of the grader is an `error`, never a reward of zero. Numbers of
    other kinds, as numpy's or a tensor, become floats: scores are written as JSON."""

    reward: float
    reason: str = ""  # for readers and SDPO's teacher: the first failing test, the last lines of the exception
    error: str | None = None
    correct: bool | None = None  # whether pass@1 counts it as right; None: pass@1 takes the reward
    shaping: float = 0.0  # added to the reward only in training
    details: dict[str, Any] = field(default_factory=dict)  # by reward kind: tests passed and failed, parts of a sum

    def __post_init__(self):
        for name in ("reward", "shaping"):
            object.__setattr__(self, name, float(getattr(self, name)))
        object.__setattr__(self, "reason", str(self.reason or ""))

    @property
    def right(self) -> bool:
        return self.reward >= 1 if self.correct is None else self.correct
