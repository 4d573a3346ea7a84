"""A guess of the response changes how fast it comes, and none of its tokens: at any temperature, right or wrong."""

import random

import pytest
import torch

from megatron_rft.inference.engine import Request, Sampling
from megatron_rft.inference.hf import decoder
from megatron_rft.inference.hf.drafts import Guess
from tests.unit.inference.hf.test_engine import answers, some_requests
from tests.unit.inference.tiny import CONFIGS, build_engine, build_model

LIMIT = 30


def spoilt(tokens: tuple[int, ...], how: str, rng: random.Random) -> tuple[int, ...]:
    middle = len(tokens) // 2
    other = (tokens[middle] + 1) % 64
    return {
        "the same": tokens,
        "one changed": (*tokens[:middle], other, *tokens[middle + 1 :]),
        "one missing": (*tokens[:middle], *tokens[middle + 1 :]),
        "one more": (*tokens[:middle], other, *tokens[middle:]),
        "cut": tokens[:middle],
        "longer": tokens + tokens,
        "nonsense": tuple(rng.randrange(3, 64) for _ in range(40)),
    }[how]


HOW = ("the same", "one changed", "one missing", "one more", "cut", "longer", "nonsense")


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.3])
@pytest.mark.parametrize("family", CONFIGS)
def test_a_draft_changes_no_token(family, temperature):
    """Eight rows for 21 responses, so that guesses move and others come in; stop tokens within drafts."""
    sampling = Sampling(LIMIT, temperature=temperature, stop_token_ids=(2, 7))
    engine, rng = build_engine(build_model(family), rows=8), random.Random(1)
    plain = some_requests(21, n=1)
    expected = answers(engine, plain, sampling)
    for shift in (0, 3):
        drafted = []
        for number, request in enumerate(plain):
            draft = spoilt(expected[request.id][0].token_ids, HOW[(number + shift) % len(HOW)], rng)
            drafted.append(Request(request.id, request.prompt_ids, 1, request.seed, draft=draft))
        found = answers(engine, drafted, sampling)
        for id, (response,) in found.items():
            assert response.token_ids == expected[id][0].token_ids
            assert response.finish_reason == expected[id][0].finish_reason
            ours, theirs = (torch.tensor(each.logprobs) for each in (response, expected[id][0]))
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_samples_and_limits_of_their_own(engine):
    """Several samples of one request share a draft that fits one of them at most; some requests end earlier."""
    sampling = Sampling(LIMIT, stop_token_ids=(2,))
    plain = some_requests(5, n=3) + [Request(99, (5, 6), 2, seed=1, max_tokens=4), Request(98, (5, 6), 2, seed=3)]
    expected = answers(engine, plain, sampling)
    drafted = [
        Request(r.id, r.prompt_ids, r.n, r.seed, r.max_tokens, expected[r.id][0].token_ids) for r in plain if r.id != 98
    ]
    found = answers(engine, drafted + plain[-1:], sampling)
    assert {id: [r.token_ids for r in rs] for id, rs in found.items()} == {
        id: [r.token_ids for r in rs] for id, rs in expected.items()
    }


def passes(engine, requests, sampling, monkeypatch) -> int:
    """Forward passes over the live rows, after the prefill."""
    made = []
    begin = decoder.SharedPrefixCache.begin_decode
    monkeypatch.setattr(
        decoder.SharedPrefixCache, "begin_decode", lambda self, *a, **k: made.append(1) or begin(self, *a, **k)
    )
    answers(engine, requests, sampling)
    monkeypatch.undo()
    return len(made)


def test_a_copy_is_one_pass(model, engine, monkeypatch):
    sampling = Sampling(LIMIT)
    plain = some_requests(6, n=1)
    expected = answers(engine, plain, sampling)
    copies = [Request(r.id, r.prompt_ids, 1, r.seed, draft=expected[r.id][0].token_ids) for r in plain]
    assert passes(engine, plain, sampling, monkeypatch) == LIMIT - 1
    assert passes(engine, copies, sampling, monkeypatch) == 1
    rng = random.Random(2)
    edited = [
        Request(r.id, r.prompt_ids, 1, r.seed, draft=spoilt(expected[r.id][0].token_ids, how, rng))
        for r, how in zip(plain, ("one changed", "one missing", "one more") * 2, strict=True)
    ]
    assert passes(engine, edited, sampling, monkeypatch) <= 8


def test_a_small_budget_cuts_the_passes_and_nothing_else(model, engine, monkeypatch):
    sampling = Sampling(LIMIT, temperature=0.7)
    plain = some_requests(4, n=1)
    expected = answers(engine, plain, sampling)
    copies = [Request(r.id, r.prompt_ids, 1, r.seed, draft=expected[r.id][0].token_ids) for r in plain]
    monkeypatch.setattr(decoder, "MOST_SCORES", 4 * 4 * 60 * 5)
    assert answers(engine, copies, sampling).keys() == expected.keys()
    found = answers(engine, copies, sampling)
    assert all(found[id][0].token_ids == expected[id][0].token_ids for id in expected)


def test_the_place_in_a_draft_by_hand():
    """Draft 1 2 3 4 5 6; the response changes 3 to 9, then leaves out 4."""
    guess = Guess((1, 2, 3, 4, 5, 6))
    assert guess.tokens() == (1, 2, 3, 4, 5, 6)
    guess.took([1], 1)
    assert guess.tokens() == (2, 3, 4, 5, 6)
    guess.took([1, 2, 9], 2)
    assert guess.tokens() == (4, 5, 6)  # one token is taken to have been changed
    guess.took([2, 9, 5], 1)
    assert guess.tokens() == (5, 6)  # and one more
    guess.took([9, 5, 6], 2)
    assert guess.tokens() == ()  # 5 6 is found again, at the end
