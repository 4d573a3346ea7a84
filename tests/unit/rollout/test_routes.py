"""The engine's experts between sampling and training: what is refused, kept, saved and restored."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_rft.megatron.packing import PackLayout, pack
from megatron_rft.objectives.plugins.dynamic import pairs
from megatron_rft.records import Batch, Prompt, Response, Score
from megatron_rft.rollout.routes import RouteStore
from megatron_rft.rollout.sampler import ScoredResponse, to_batch
from megatron_rft.utils.errors import RunFailed

PROMPT = Prompt(7, (3, 4, 5), "", "")


def store() -> RouteStore:
    return RouteStore([1, 3], experts=8, chosen=2)


def routes(tokens: int = 6, seed: int = 0) -> np.ndarray:
    """[tokens, 2 layers, 2 experts]"""
    generator = np.random.default_rng(seed)
    return np.stack([[generator.permutation(8)[:2] for _ in range(2)] for _ in range(tokens)]).astype(np.int16)


def rollout(experts: np.ndarray | None, sample: int = 0, index: int = 0) -> ScoredResponse:
    response = Response((6, 7, 8, 2), (-1.0,) * 4, "stop", 0, routes=experts)
    return ScoredResponse(index, sample, PROMPT, response, "", Score(1.0))


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ((4, 1, 0), -1, "token 4, layer 3: expert -1 is missing"),
        ((2, 0, 1), 8, "token 2, layer 1: expert 8 is foreign: the model has 8"),
    ],
)
def test_experts_that_the_model_does_not_have_are_refused(place, value, message):
    wrong = routes()
    wrong[place] = value
    with pytest.raises(RunFailed, match=f"step 5, problem 7, response 3: .*{message}"):
        store().take([rollout(wrong, 3)], 5)


def test_missing_and_double_experts_are_refused():
    double = routes()
    double[5, 1] = 6
    with pytest.raises(RunFailed, match="token 5, layer 3: expert 6 is there twice"):
        store().take([rollout(double)], 1)
    with pytest.raises(RunFailed, match="token 4 has no experts"):
        store().take([rollout(routes(4))], 1)
    with pytest.raises(RunFailed, match="token 0 has no experts.*replay_routes=off"):
        store().take([rollout(None)], 1)
    with pytest.raises(RunFailed, match=r"\(6, 1, 2\) of \(tokens, layers, experts per token\) \(6, 2, 2\)"):
        store().take([rollout(routes()[:, :1])], 1)


def test_a_response_without_a_reward_needs_none():
    failed = replace(rollout(None), score=Score(0.0, error="the environment failed"))
    kept = store()
    (found,) = kept.take([failed], 1)
    assert found.response.routes == -1 and not kept.held


def test_a_batch_has_keys_and_the_store_forgets_what_no_batch_needs():
    kept = store()
    batches = [to_batch(kept.take([rollout(routes(seed=step), sample=step)], step)) for step in (1, 2, 3)]
    keys = [int(batch.sequences["route"]) for batch in batches]
    assert list(kept.held) == keys and kept.held[keys[1]].dtype == np.uint8
    kept.release(2, [batches[0].sequences["route"]])  # a stored batch of step 1; step 3 is pending
    assert list(kept.held) == [keys[0], keys[2]]
    state = kept.state(list) | {"mu": torch.zeros(1)}
    resumed = [store(), store()]
    for rank, one in enumerate(resumed):
        assert set(one.restore(state, rank, 2)) == {"mu"}
    assert sorted(key for one in resumed for key in one.held) == [keys[0], keys[2]]
    assert all(np.array_equal(routes, kept.held[key]) for one in resumed for key, routes in one.held.items())


def test_other_prompts_and_refined_responses_have_no_routes():
    batch = Batch.of([[3, 4]] * 2, [[5, 6]] * 2, sequences={"route": torch.tensor([10, 11])})
    assert "route" not in batch.with_contexts([[8], []]).in_context().sequences
    assert pairs(batch.with_refined([[7, 8], []])).sequences["route"].tolist() == [-1]


@pytest.mark.parametrize("packed", [True, False])
def test_each_token_gets_its_experts(packed):
    """A shared prompt gets those of its first response with routes; padding and sequences without routes get -1."""
    batch = Batch.of([[3, 4, 5], [3, 4, 5], [9]], [[6, 7, 2], [2], [8, 2]])
    given = [torch.from_numpy(routes(tokens, tokens)) for tokens in (5, 3)]
    layout = PackLayout(packed=packed, share_prompts=packed, total_multiple=4)
    micro = pack(batch, layout, torch.device("cpu"), [None, given[1], None])
    table = micro.routes if packed else micro.routes.view(8, 3, 2, 2)[:, 1]
    assert torch.equal(table[:3], given[1]) and (table[3:] == -1).all() and len(table) == 8
    micro = pack(batch, layout, torch.device("cpu"), [*given, None])
    table = micro.routes if packed else micro.routes.view(8, 3, 2, 2)[:, 0]
    assert torch.equal(table[:5], given[0]) and (table[5:] == -1).all()


def test_a_token_counts_for_each_response_that_has_it():
    batch = Batch.of([[3, 4, 5], [3, 4, 5], [9]], [[6, 7, 2], [2], [8, 2]])
    shared = pack(batch, PackLayout(share_prompts=True, total_multiple=4), torch.device("cpu"), [])
    assert shared.uses.tolist() == [2, 2, 2, 1, 1, 1, 1, 0]
    padded = pack(batch, PackLayout(packed=False), torch.device("cpu"), [])  # [S, b]
    assert padded.uses.view(5, 3).t().tolist() == [[1] * 5, [1, 1, 1, 0, 0], [1, 1, 0, 0, 0]]
