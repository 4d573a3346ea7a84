"""How scored responses travel between ranks: tokens and log-probs of a rank as two arrays, 8 bytes a token, and the
rest without texts, which go to rank 0 alone. As Python objects they would take twice the bytes and ten times the time,
on every rank.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_rft.records import Prompt


@dataclass(frozen=True)
class Parcel:
    """One rank's RoundResult of `count` tokens end to end. Its rollouts lack prompts, texts, tokens and log-probs."""

    result: Any
    lens: np.ndarray  # [B] int32
    token_ids: np.ndarray  # [R] int32
    logprobs: np.ndarray  # [R] float32

    @property
    def rollouts(self) -> list:
        return self.result.rollouts


def pack(result: Any) -> Parcel:
    responses = [rollout.response for rollout in result.rollouts]
    return Parcel(
        replace(result, rollouts=[_lean(rollout) for rollout in result.rollouts]),
        np.array([len(response.token_ids) for response in responses], dtype=np.int32),
        _joined((response.token_ids for response in responses), np.int32),
        _joined((response.logprobs for response in responses), np.float32),
    )


def unpack(parcel: Parcel, prompts: dict[int, Prompt]) -> list:
    """Return the rollouts, whose tokens and log-probs are parts of the parcel's arrays. `prompts`: of the step, by
    index in it."""
    ends = parcel.lens.cumsum()[:-1]
    parts = zip(parcel.rollouts, np.split(parcel.token_ids, ends), np.split(parcel.logprobs, ends), strict=False)
    return [
        replace(
            rollout,
            prompt=prompts[rollout.prompt_index],
            response=replace(rollout.response, token_ids=token_ids, logprobs=logprobs),
        )
        for rollout, token_ids, logprobs in parts
    ]


def texts(result: Any) -> list[tuple]:
    """Return what only rank 0 needs: (index of the prompt, sample), text, and the score's reason and details."""
    return [((r.prompt_index, r.sample), r.text, r.score.reason, r.score.details) for r in result.rollouts]


def with_texts(rollouts: list, found: list[tuple]) -> list:
    """Return the rollouts with those texts that are there."""
    named = {key: rest for key, *rest in found}
    return [_with_text(rollout, *named.get((rollout.prompt_index, rollout.sample), ())) for rollout in rollouts]


def _with_text(rollout: Any, *found: Any) -> Any:
    if not found:
        return rollout
    text, reason, details = found
    return replace(rollout, text=text, score=replace(rollout.score, reason=reason, details=details))


def _lean(rollout: Any) -> Any:
    score = rollout.score
    fine = score.error is None and math.isfinite(score.reward + score.shaping)  # else a message on every rank names it
    return replace(
        rollout,
        prompt=None,
        text="" if fine else rollout.text,
        response=replace(rollout.response, token_ids=(), logprobs=()),
        score=replace(score, reason="", details={}),
        context=None if rollout.context is None else np.array(rollout.context, dtype=np.int32),
    )


def _joined(parts: Iterable, dtype: type) -> np.ndarray:
    arrays = [np.asarray(part, dtype=dtype) for part in parts]
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=dtype)
