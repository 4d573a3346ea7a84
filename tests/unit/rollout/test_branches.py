"""Episodes with segments from a real engine, through sampling, checkpoints, router replay, stores and evaluation."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_rft.data import trajectories as store
from megatron_rft.evaluation.evaluate import GradedSampler, evaluate
from megatron_rft.megatron.packing import PackLayout, pack
from megatron_rft.objectives.base import sequence_means
from megatron_rft.records import Prompt, Response, Score
from megatron_rft.rewards.base import Reward
from megatron_rft.rollout.routes import RouteStore
from megatron_rft.rollout.sampler import ScoredResponse, to_batch
from megatron_rft.training.generate import answers
from megatron_rft.training.online_batches import shown_samples
from tests.branching import AGENT, ANEW, SAID, branching
from tests.unit.rollout.test_sampler import SAMPLING, EvenLength, Letters, build, draw, prompts, same


class Branching:
    """Around an engine."""

    def __init__(self, engine):
        self.engine = engine

    def generate(self, requests, sampling):
        return branching(self.engine.generate, requests, sampling)


@pytest.fixture
def sampled(engine):
    return build(Branching(engine)).sample(draw, 3, step=4)


def test_one_episode_is_one_sequence(sampled):
    """Of three responses to each prompt the first and the last have three segments and four turns."""
    batch, metrics = sampled.batch, sampled.metrics
    assert len(batch) == 9 and batch.segment_counts.tolist() == [3, 1, 3] * 3
    assert batch.sequences["group"].tolist() == [0] * 3 + [1] * 3 + [2] * 3
    assert batch.scalars["sampled_count"] == 9
    played = [rollout.response for rollout in sampled.rollouts]
    assert metrics["tokens/generated"] == batch.response_mask.sum() == sum(each.length for each in played)
    assert metrics["environment/segments_mean"] == pytest.approx(21 / 9)
    assert metrics["environment/turns_max"] == 4
    assert metrics["environment/reward_mean"] == pytest.approx(0.5 * 6 / 9)
    verdicts = torch.tensor([each.score.reward - 0.5 * (each.response.segment_count > 1) for each in sampled.rollouts])
    assert ((verdicts == 0) | (verdicts == 1)).all(), "a turn's reward counts once, and the last turn is judged"


def test_its_log_probs_are_those_of_its_segments(sampled, model):
    """Recomputed by transformers, a segment at a time."""
    batch = sampled.batch
    inside, places = batch.by_segment()
    assert len(inside) == 21
    new = torch.zeros(len(batch.response_ids))
    row = iter(places.tolist())
    prompts, responses = (
        ids.split(lens.tolist())
        for ids, lens in ((inside.prompt_ids, inside.prompt_lens), (inside.response_ids, inside.response_lens))
    )
    assert sum(prompt.tolist() == list(AGENT) for prompt in prompts) == 6
    for prompt, response in zip(prompts, responses, strict=True):
        with torch.no_grad():
            logits = model(torch.cat([prompt, response])[None]).logits[0].float()
        logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, response[:, None])[:, 0]
        for value in logprobs:
            new[next(row)] = value
    own = batch.response_mask > 0
    assert torch.allclose(new[own], batch.tokens["rollout_logprobs"][own], atol=1e-5)


@pytest.mark.parametrize("world", [2])
def test_ranks_share_the_work(engine, sampled, world):
    shares = []
    for rank in range(world):
        gather = lambda mine: shares.append(mine) or mine  # noqa: E731
        build(Branching(engine), driver=(rank, world), gather=gather).sample(draw, 3, step=4)
    together = build(Branching(engine), gather=lambda mine: [each for own in shares for each in own])
    assert same(together.sample(draw, 3, step=4).batch, sampled.batch)


def test_truncated_sampling_keeps_the_supports_of_each_token(engine):
    sampler = build(Branching(engine))
    sampler.sampling = replace(SAMPLING, top_k=3)
    batch = sampler.sample(draw, 2, step=1).batch
    own = batch.response_mask > 0
    assert (batch.support_lens[own] >= 1).all() and (batch.support_lens[own] <= 3).all()
    assert (batch.support_lens[~own] == 0).all() and not own.all()
    ids, lens = batch.support_of(own.nonzero().flatten())
    for token, kept in zip(batch.response_ids[own].tolist(), ids.split(lens.tolist()), strict=True):
        assert token in kept


def test_the_oldest_weights_of_a_segment_count(engine):
    class Newer(Branching):
        def generate(self, requests, sampling):
            for group in super().generate(requests, sampling):
                aged = [replace(each, weight_version=9) if each.segments else each for each in group.responses]
                yield replace(group, responses=tuple(aged))

    batch = build(Newer(engine)).sample(draw, 2, step=4).batch
    assert batch.sequences["weight_version"].unique().tolist() == [3] and batch.scalars["oldest_version"] == 3


def test_a_teachers_context_replaces_the_first_prompt(sampled):
    batch = sampled.batch.with_contexts([[20, 21, 22]] * 9).in_context()
    inside, _ = batch.by_segment()
    read = [ids.tolist() for ids in inside.prompt_ids.split(inside.prompt_lens.tolist())]
    assert read[:4] == [[20, 21, 22], list(AGENT), list(ANEW), [20, 21, 22]]


def test_the_report_has_the_pieces_of_segments(sampled):
    class Text(Letters):
        def decode(self, ids):
            return super().decode(ids, skip_special_tokens=True)

    samples = shown_samples(sampled.batch, [], sampled.rollouts, Text())
    tree = next(each for each in samples if each.segments)
    assert [number for *_, number in tree.segments] == [0, -1, 1, 0, -2, 2] and len(tree.turns) == 4
    assert tree.segments[0][0] == 0 and tree.segments[-1][1] == len(tree.tokens)
    first, end, _ = tree.segments[1]
    assert "".join(tree.tokens[first:end]) == "".join(chr(62 + i) for i in AGENT)
    assert all(one[1] == other[0] for one, other in zip(tree.segments, tree.segments[1:], strict=False))


def routed(seed: int, tokens: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return np.stack([[generator.permutation(8)[:2] for _ in range(2)] for _ in range(tokens)]).astype(np.int16)


@pytest.mark.parametrize("packed", [True, False])
def test_each_token_of_a_segment_gets_its_experts(packed):
    first, last = routed(1, 5), routed(2, 4)
    turns = ((0, 1, 0.0), (3, 4, 0.0))
    other = Response((6, 7, 9, 8), (-1.0,) * 4, "stop", 0, (), turns, (3, 4), order=(0, 1), routes=first)
    response = Response((6, 2), (-1.0,) * 2, "stop", 0, prompt_ids=(4, 5, 5), order=(2,), routes=last)
    response = replace(response, segments=(other,))
    plain = Response((6, 7, 2), (-1.0,) * 3, "stop", 0, turns=((0, 3, 0.0),), routes=routed(3, 4))
    kept, prompt = RouteStore([1, 3], experts=8, chosen=2), Prompt(7, (3, 4), "", "")
    rollouts = [ScoredResponse(0, i, prompt, each.joined(), "", Score(1.0)) for i, each in enumerate((response, plain))]
    batch = to_batch(kept.take(rollouts, 1))
    given = [torch.from_numpy(kept.held[key].astype(np.int16)) for key in batch.sequences["route"].tolist()]
    assert [len(each) for each in given] == [9, 4]
    micro = pack(batch, PackLayout(packed=packed), torch.device("cpu"), given)
    table = micro.routes if packed else micro.routes.view(5, 3, 2, 2).transpose(0, 1).flatten(0, 1)
    wanted = [torch.from_numpy(each) for each in (first, last, routed(3, 4))]
    found = table.split([5, 4, 4] if packed else [5, 5, 5])
    assert all(torch.equal(part[: len(own)], own) for part, own in zip(found, wanted, strict=True))


class EvenEnd(Reward):
    """1 for a text whose last letter has an even number."""

    maximum = 1.0

    def __call__(self, prompts: list[Prompt], texts: list[str]) -> list[Score]:
        return [Score(float(ord(text[-1]) % 2 == 0)) for text in texts]


def test_a_store_keeps_segments(engine, tmp_path):
    sampler = GradedSampler(Branching(engine), SAMPLING, Letters(), EvenEnd(), samples=4, seed=3)
    graded = answers(sampler, prompts(4))
    store.write_shard(tmp_path, 0, graded)
    store.finish(tmp_path, 1, 0.0, 0, {"environment": {"kind": "program"}})
    data = store.read(tmp_path).train
    wanted = [each for each in graded if each.problem in set(data.sequences["group"].tolist())]
    wanted.sort(key=lambda each: (each.problem, each.sample))
    assert len(data) == len(wanted) and data.segment_counts.tolist() == [3, 1] * (len(data) // 2)
    assert data.segment_of.tolist() == [n for each in wanted for n in each.segment_of or [0] * len(each.response_ids)]
    policy = torch.tensor([sum(e - b for b, e in zip(t.turns[::2], t.turns[1::2], strict=True)) for t in wanted])
    lens = torch.zeros(len(data)).index_add_(0, data.sequence_ids, data.response_mask)
    assert torch.equal(lens, policy.float())
    logprobs = torch.rand(len(data.response_ids))
    per_episode = [logprobs[(data.sequence_ids == i) & (data.response_mask > 0)].mean() for i in range(len(data))]
    assert torch.allclose(sequence_means(logprobs, data), torch.stack(per_episode))


def test_evaluation_counts_episodes(engine):
    sampler = GradedSampler(Branching(engine), SAMPLING, Letters(), EvenLength(), samples=4, seed=3)
    result = evaluate(sampler, prompts(3))
    assert result.problems == 3 and len(result.completions) == 12
    answered = [each for _, _, each, *_ in sampler(prompts(3), "test")]
    assert result.mean_tokens == pytest.approx(sum(each.length for each in answered) / 12)
    assert chr(62 + SAID[0]) in result.completions[0].text
