"""A problem, a response to it, and its score: what the processes of environments and graders share. No torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, count, islice
from typing import Any

from megatron_rft.utils.errors import CodeError

SHOWN = 1 << 61  # the least key of an episode's images


def number(value: Any) -> float:
    """A number of any kind, as numpy's or a tensor of one. Raises TypeError for texts and what else is none."""
    if isinstance(value, str | bytes) or not (hasattr(value, "__float__") or hasattr(value, "__index__")):
        raise TypeError(f"{value!r:.80} is no number")
    return float(value)


@dataclass(frozen=True)
class Prompt:
    """One problem. `index` is its row in the data set: stable over epochs, part of every sampling seed."""

    index: int
    token_ids: tuple[int, ...]
    text: str
    answer: str
    fields: dict[str, Any] = field(default_factory=dict)  # the rest of the row: level, subject, tests ...
    question: str = ""  # `text` before the chat template; prompts with feedback or for a refiner are made from it
    images: Any = None  # data.images.Pictures, if the data set has a column of images
    # whether the chat template has opened a thought, <think>, that responses can be seen to close
    opened: bool = field(default=False, repr=False)

    @property
    def images_key(self) -> int:
        """By which ranks look up its images; -1 without any."""
        return self.index if self.images and self.images.grids else -1

    @property
    def shown(self) -> "Prompt | None":
        """What engines read of it: its images. A row may be large."""
        return Prompt(self.index, (), "", "", images=self.images) if self.images_key >= 0 else None


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
    images: int | None = None  # key of the images of an episode that was shown some (data.images.keep), -1: none
    # An episode that is not one sequence of tokens, as that of a program that compacts its history or asks a sub-agent:
    # its other segments, each with own prompt, tokens, turns and routes. The own fields are of the one with the last
    # turn. One episode is one response with one reward, and each sampled token is in one turn of one segment.
    segments: "tuple[Response, ...]" = ()
    # When each own turn was sampled: its number among the turns of all segments. (): turns come in the order of the
    # segments, the own ones last.
    order: tuple[int, ...] = ()
    # After `joined`: the segment of each token; -s for the prompt of segment s > 0. Empty: all are of segment 0.
    segment_of: Sequence[int] = ()

    @property
    def length(self) -> int:
        """The number of tokens that the policy wrote."""
        own = sum(end - first for first, end, _ in self.turns) if self.turns else len(self.token_ids)
        return own + sum(segment.length for segment in self.segments)

    @property
    def segment_count(self) -> int:
        if len(self.segment_of):
            return len({int(self.segment_of[first]) for first, *_ in self.turns})
        return 1 + len(self.segments)

    @property
    def last_turn(self) -> tuple[int, ...]:
        """What a verifier judges."""
        return self.token_ids[slice(*self.turns[-1][:2])] if self.turns else self.token_ids

    def total(self, score: "Score") -> "Score":
        """The score with the rewards of the turns added. Whether it is correct stays the score's verdict."""
        rewards = [reward for each in (*self.segments, self) for *_, reward in each.turns if reward]
        if not rewards or score.error is not None:
            return score
        return replace(score, reward=score.reward + sum(rewards), correct=score.right)

    def joined(self) -> "Response":
        """The episode as one sequence: its turns in the order in which they were sampled, each behind the tokens that
        its segment has before it, which in later segments begin with the prompt. Segments have numbers in the order of
        their first turns; `prompt_ids` are those of segment 0. An episode without segments is returned as it is."""
        return self._joined() if self.segments else self

    def _joined(self) -> "Response":
        parts = [part._opened(number) for number, part in enumerate(_by_first_turn((*self.segments, self)))]
        pieces = sorted(piece for number, part in enumerate(parts) for piece in part._pieces(number))
        assert len({when for when, *_ in pieces}) == len(pieces), "two turns have one number"
        assert not self.order or self.order[-1] == pieces[-1][0], "another segment has the last turn"
        starts = accumulate((end - before for _, _, before, _, end, _ in pieces), initial=0)

        def chained(name: str) -> tuple:
            return tuple(chain.from_iterable(getattr(parts[n], name)[before:end] for _, n, before, _, end, _ in pieces))

        return replace(
            self,
            **{name: chained(name) for name in ("token_ids", "logprobs", "supports", "segment_of")},
            turns=tuple(
                (start + first - before, start + end - before, reward)
                for start, (*_, before, first, end, reward) in zip(starts, pieces, strict=False)
            ),
            prompt_ids=parts[0].prompt_ids,
            weight_version=min(part.weight_version for part in parts),
            routes=None if any(part.routes is None for part in parts) else tuple(part.routes for part in parts),
            segments=(),
            order=(),
        )

    def _opened(self, number: int) -> "Response":
        """Segment `number` up to its last turn, with its prompt as its first tokens unless it is segment 0."""
        assert self.prompt_ids is not None, "a segment without a prompt"
        prompt, end = self.prompt_ids if number else (), self.turns[-1][1]
        shift = len(prompt)
        return replace(
            self,
            token_ids=(*prompt, *self.token_ids[:end]),
            logprobs=(*[0.0] * shift, *self.logprobs[:end]),
            supports=self.supports and (*[()] * shift, *self.supports[:end]),
            segment_of=(*[-number] * shift, *[number] * end),
            turns=tuple((first + shift, last + shift, reward) for first, last, reward in self.turns),
            routes=None if self.routes is None else self.routes[: len(self.prompt_ids) + end - 1],
        )

    def _pieces(self, number: int) -> Iterator[tuple[int, int, int, int, int, float]]:
        """(when it was sampled, segment, end of the turn before it, first, end, reward) of each turn."""
        before = 0
        for when, turn in zip(self.order, self.turns, strict=True):
            yield when, number, before, *turn
            before = turn[1]


def _by_first_turn(segments: tuple[Response, ...]) -> list[Response]:
    """The segments of an episode with their turns and the order of these written out."""
    later, full = count(), []
    for each in segments:
        turns = each.turns or ((0, len(each.token_ids), 0.0),)
        full.append(replace(each, turns=turns, order=each.order or tuple(islice(later, len(turns)))))
    return sorted(full, key=lambda each: each.order[0])


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
        try:
            for name in ("reward", "shaping"):
                object.__setattr__(self, name, number(getattr(self, name)))
            if self.correct is not None:
                object.__setattr__(self, "correct", {0: False, 1: True}[number(self.correct)])
        except (KeyError, TypeError) as error:
            raise CodeError(f"Score: {error}: reward and shaping are numbers, correct is True, False or None") from None
        object.__setattr__(self, "reason", str(self.reason or ""))

    @property
    def usable(self) -> bool:
        return self.error is None and abs(self.reward) + abs(self.shaping) < 3e38  # fp32 has no larger; False for NaN

    @property
    def right(self) -> bool:
        return self.reward >= 1 if self.correct is None else self.correct
