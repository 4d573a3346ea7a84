"""Selects the responses of a step that the report shows, with all their values per token."""

from typing import Any

import torch

from megatron_rft.objectives.base import Update
from megatron_rft.records import Batch
from megatron_rft.rollout.sampler import Rollout
from megatron_rft.tracking.samples import Sample

GROUPS = 2  # shown with their best and worst response


def take(batch: Batch, updates: list[Update], rollouts: list[Rollout], tokenizer: Any) -> list[Sample]:
    """Samples from a step's batch with the models' outputs, and its updates."""
    batch = with_credit(batch, updates)
    found = {(rollout.prompt_index, rollout.response.token_ids): rollout for rollout in rollouts}
    return [sample(batch.select(torch.tensor([row])), found, tokenizer) for row in chosen(batch)]


def with_credit(batch: Batch, updates: list[Update]) -> Batch:
    """The batch with the objective's values per token, such as advantages, if an update has the same sequences
    (possibly followed by refined ones)."""
    count = len(batch.response_ids)
    for update in updates:
        if update.model == "actor" and torch.equal(update.batch.response_ids[:count], batch.response_ids):
            added = {name: values[:count] for name, values in update.batch.tokens.items() if name != "refined_mask"}
            batch = batch.with_tokens(**added)
    return batch


def chosen(batch: Batch) -> list[int]:
    """Rows: the best and the worst response of the first groups with unequal rewards, or the first response of
    others."""
    rewards = batch.sequences["rewards"]
    rows_of = [(batch.groups == group).nonzero().flatten() for group in batch.groups.unique()]
    rows_of.sort(key=lambda rows: bool(rewards[rows].min() == rewards[rows].max()))  # stable: equal rewards come last
    picked: list[int] = []
    for rows in rows_of[:GROUPS]:
        best, worst = rows[rewards[rows].argmax()], rows[rewards[rows].argmin()]
        picked += dict.fromkeys((int(best), int(worst)))
    return picked


def sample(one: Batch, rollouts: dict[tuple[int, tuple[int, ...]], Rollout], tokenizer: Any) -> Sample:
    """The sample of a batch of one sequence."""
    ids = one.response_ids.tolist()
    rollout = rollouts.get((int(one.groups[0]), tuple(ids)))
    about = {}
    if rollout is not None:
        about = {"answer": rollout.prompt.answer, "reason": rollout.score.reason, "problem": rollout.prompt.index}
    shaping = one.sequences.get("shaping", torch.zeros(1))
    return Sample(
        prompt=tokenizer.decode(one.prompt_ids.tolist()),
        tokens=pieces(tokenizer, ids),
        reward=one.sequences["rewards"].item(),
        values={name: values.tolist() for name, values in one.tokens.items() if name != "response_mask"},
        finished=bool(one.sequences["finished"].item()) if "finished" in one.sequences else True,
        shaping=shaping.item(),
        **about,
    )


def pieces(tokenizer: Any, ids: list[int]) -> list[str]:
    """The text of each token. A token that ends within a character gets "", and the token that completes it gets the
    character."""
    texts, start = [], 0
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[start:end])
        whole = not text.endswith("\ufffd") or end - start >= 4 or end == len(ids)
        texts.append(text if whole else "")
        start = end if whole else start
    return texts
