"""Scored responses on their way to all ranks."""

import pickle

import numpy as np
import torch

from megatron_rft.records import Prompt, Response, Score
from megatron_rft.rollout import travel
from megatron_rft.rollout.sampler import RoundResult, ScoredResponse, to_batch

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
    sent = pickle.loads(pickle.dumps(travel.pack(RoundResult(some, 1.0, 2.0))))
    found = travel.unpack(sent, PROMPTS)
    ours, theirs = to_batch(found), to_batch(some)
    assert torch.equal(ours.response_ids, theirs.response_ids) and torch.equal(ours.prompt_ids, theirs.prompt_ids)
    assert torch.equal(ours.tokens["rollout_logprobs"], theirs.tokens["rollout_logprobs"])
    assert all(torch.equal(ours.sequences[name], theirs.sequences[name]) for name in theirs.sequences)
    assert [each.text for each in found] == [""] * 16 and found[3].score.reason == ""
    whole = travel.with_texts(found, travel.texts(RoundResult(some, 1.0, 2.0)))  # rank 0
    assert [(each.text, each.score) for each in whole] == [(each.text, each.score) for each in some]


def test_a_token_takes_at_most_ten_bytes():
    sent = travel.pack(RoundResult(rollouts(), 1.0, 2.0))
    tokens = sum(len(rollout.response.token_ids) for rollout in sent.rollouts)
    assert len(pickle.dumps(sent)) / tokens <= 10


def test_a_rank_without_responses_sends_none():
    assert travel.unpack(travel.pack(RoundResult([], 0.0, 0.0)), {}) == []


def test_a_reward_that_is_no_number_keeps_its_text_for_the_message_on_every_rank():
    broken = ScoredResponse(0, 0, PROMPTS[0], Response((5,), (-1.0,), "stop", 0), "a text", Score(float("nan")))
    (found,) = travel.unpack(travel.pack(RoundResult([broken], 1.0, 1.0)), PROMPTS)
    assert found.text == "a text"
