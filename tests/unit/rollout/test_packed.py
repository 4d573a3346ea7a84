"""Scored responses on their way to all ranks."""

import pickle
from dataclasses import replace

import numpy as np
import torch

from megatron_rft.records import Prompt, Response, Score
from megatron_rft.rollout.sampler import ScoredResponse, packed, to_batch, with_words, words_of

PROMPTS = {index: Prompt(10 + index, tuple(range(3, 20)), f"problem {index}", "4") for index in range(4)}


def rollouts(length: int = 1000) -> list[ScoredResponse]:
    generator = np.random.default_rng(1)
    return [
        ScoredResponse(
            index,
            sample,
            PROMPTS[index],
            Response(tuple(generator.integers(0, 150_000, length).tolist()), tuple([-0.5] * length), "stop", 3),
            "text " * length,
            Score(float(sample), "the first failing test", details={"passed": sample}),
        )
        for index in PROMPTS
        for sample in range(4)
    ]


def test_they_arrive_as_they_left():
    some = rollouts(7)
    sent = pickle.loads(pickle.dumps(list(map(packed, some))))
    found = [replace(each, prompt=PROMPTS[each.prompt_index]) for each in sent]
    ours, theirs = to_batch(found), to_batch(some)
    assert torch.equal(ours.response_ids, theirs.response_ids) and torch.equal(ours.prompt_ids, theirs.prompt_ids)
    assert torch.equal(ours.tokens["rollout_logprobs"], theirs.tokens["rollout_logprobs"])
    assert all(torch.equal(ours.sequences[name], theirs.sequences[name]) for name in theirs.sequences)
    assert [each.text for each in found] == [""] * 16 and found[3].score.reason == ""
    words = dict(map(words_of, some))  # on rank 0
    whole = [with_words(each, words) for each in found]
    assert [(each.prompt, each.text, each.score) for each in whole] == [(e.prompt, e.text, e.score) for e in some]


def test_a_token_takes_at_most_ten_bytes():
    sent = list(map(packed, rollouts()))
    tokens = sum(len(rollout.response.token_ids) for rollout in sent)
    assert len(pickle.dumps(sent)) / tokens <= 10
