"""How scored responses travel between ranks: tokens and log-probs as arrays, 8 bytes a token, and the rest without
texts, which go to rank 0 alone. As Python objects tokens would take twice the bytes and ten times the time, on every
rank.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_rft.records import Prompt


def pack(result: Any) -> Any:
    """Return a rank's RoundResult as it travels: its rollouts lack prompts and texts."""
    return replace(result, rollouts=[_lean(rollout) for rollout in result.rollouts])


def unpack(result: Any, prompts: dict[int, Prompt]) -> list:
    """Return the rollouts, whose tokens and log-probs are arrays. `prompts`: of the step, by index in it."""
    return [replace(rollout, prompt=prompts[rollout.prompt_index]) for rollout in result.rollouts]


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
    score, response = rollout.score, rollout.response
    fine = score.error is None and math.isfinite(score.reward + score.shaping)  # else a message on every rank names it
    token_ids, logprobs = np.asarray(response.token_ids, np.int32), np.asarray(response.logprobs, np.float32)
    return replace(
        rollout,
        prompt=None,
        text="" if fine else rollout.text,
        response=replace(response, token_ids=token_ids, logprobs=logprobs),
        score=replace(score, reason="", details={}),
        context=None if rollout.context is None else np.array(rollout.context, dtype=np.int32),
    )
