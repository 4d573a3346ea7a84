"""Batches from a real engine: the same for any number of ranks, filtered, refilled, and with failed graders."""

import math
import time
from dataclasses import replace

import pytest
import torch

from megatron_rft.inference.engine import Sampling, request_seed
from megatron_rft.records import Batch, Prompt, Score
from megatron_rft.rewards.base import Reward
from megatron_rft.rollout.sampler import ScoredResponse
from megatron_rft.utils.errors import RunFailed
from tests.made import WholeStep

SAMPLING = Sampling(8, stop_token_ids=(2,))


class Letters:
    """Token 3 is "A", token 4 is "B" ...; the stop token is special."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens and isinstance(ids, list)
        return "".join(chr(62 + i) for i in ids if i != 2)


class EvenLength(Reward):
    """1 for a text of even length, else 0; fails on some texts and is slow on others."""

    def __init__(self, fails: str = "", slow: float = 0.0):
        self.fails, self.slow, self.calls = fails, slow, 0

    def __call__(self, prompts: list[Prompt], texts: list[str]) -> list[Score]:
        assert len(prompts) == len(texts)
        self.calls += 1
        time.sleep(self.slow)
        return [
            Score(0.0, error="the grader died") if self.fails and self.fails in text else Score(1.0 - len(text) % 2)
            for text in texts
        ]


def prompts(count: int) -> list[Prompt]:
    return [Prompt(10 + i, tuple(range(3, 4 + i % 5)), f"problem {10 + i}: ", answer="") for i in range(count)]


def draw(count: int) -> list[Prompt]:
    return prompts(count)


def build(engine, reward=None, **named) -> WholeStep:
    return WholeStep(engine, SAMPLING, reward or EvenLength(), Letters(), group_size=3, seed=1, **named)


def strict(reward: Reward) -> Reward:
    reward.max_error_share = 0.0
    return reward


def same(one: Batch, other: Batch) -> bool:
    """Equality, with log-probs up to the noise of another batch's matrix products."""
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.allclose(a[k].double(), b[k].double(), atol=1e-5) for k in a)


def test_a_batch_by_its_fields(engine):
    sampled = build(engine).sample(draw, 4, step=0)
    batch = sampled.batch
    assert len(batch) == 12
    assert batch.sequences["group"].tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert batch.sequences["prompt_index"].tolist() == [10] * 3 + [11] * 3 + [12] * 3 + [13] * 3
    assert batch.sequences["weight_version"].unique().tolist() == [3]
    ends = batch.response_ids[batch.response_lens.cumsum(0) - 1]
    assert ((ends == 2).long() == batch.sequences["finished"]).all()
    assert (batch.tokens["rollout_logprobs"] < 0).all() and (batch.tokens["response_mask"] == 1).all()
    text_lens = batch.response_lens - batch.sequences["finished"]
    assert (batch.sequences["rewards"] == 1 - text_lens % 2).all()
    assert batch.scalars["sampled_count"] == 12
    assert batch.scalars["sampled_reward_sum"] == batch.sequences["rewards"].sum()
    metrics = sampled.metrics
    assert metrics["reward/mean"] == pytest.approx(batch.sequences["rewards"].mean().item())
    assert metrics["tokens/generated"] == len(batch.response_ids)
    assert metrics["response/length_max"] == batch.response_lens.max()
    assert metrics["response/finished"] == pytest.approx(batch.sequences["finished"].float().mean().item())
    assert metrics["rollout/tokens_per_second"] > 0
    assert all(isinstance(value, float) for value in metrics.values())
    assert [rollout.prompt.index for rollout in sampled.rollouts[::3]] == [10, 11, 12, 13]


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_share_the_work_and_get_one_batch(engine, world):
    alone = build(engine).sample(draw, 5, step=2)
    own = []  # what each rank gives to gather
    for rank in range(world):
        build(engine, driver=(rank, world), gather=lambda mine: own.append(mine) or mine).sample(draw, 5, step=2)
    everything = [share for mine in own for share in mine]
    counts = [len(share.rollouts) for share in everything]
    assert sum(counts) == 15 and max(counts) - min(counts) <= 3
    for rank in range(world):
        together = build(engine, driver=(rank, world), gather=lambda mine: everything).sample(draw, 5, step=2)
        assert same(together.batch, alone.batch)


def test_steps_and_repeated_problems_have_seeds_of_their_own(engine):
    sampler = build(engine)
    first, again, later = (sampler.sample(draw, 4, step=step).batch for step in (0, 0, 1))
    assert same(first, again)
    assert first.response_ids.tolist() != later.response_ids.tolist()
    twice = sampler.sample(lambda n: prompts(1) * 2, 2, step=0).batch
    groups = [twice.select(twice.sequences["group"] == g).response_ids.tolist() for g in (0, 1)]
    assert groups[0] != groups[1]
    assert 0 <= request_seed(0, 1, 2) < 2**63 and request_seed(0, 12) != request_seed(0, 1, 2)


def test_groups_that_are_not_wanted_are_sampled_again(engine):
    """The filter rejects every problem of even index."""
    drawn = []

    def next_prompts(count: int) -> list[Prompt]:
        start = sum(drawn)
        drawn.append(count)
        return prompts(20)[start : start + count]

    def odd(batch: Batch) -> torch.Tensor:
        return batch.sequences["prompt_index"] % 2 == 1

    sampled = build(engine).sample(next_prompts, 4, step=0, keep=odd, max_rounds=10)
    kept = sampled.batch.sequences["prompt_index"].unique().tolist()
    assert drawn == [4, 2, 1, 1] and kept == [11, 13, 15, 17]
    assert len(sampled.batch.sequences["group"].unique()) == 4
    assert sampled.batch.scalars["sampled_count"] == 24, "the truth about everything that was sampled"
    assert sampled.metrics["rollout/rounds"] == 4 and sampled.metrics["rollout/kept_groups"] == 4

    drawn.clear()
    cut = build(engine).sample(next_prompts, 4, step=0, keep=odd, max_rounds=2)
    assert cut.metrics["rollout/kept_groups"] == 3 and len(cut.batch) == 9


def test_a_batch_of_which_nothing_is_wanted_stays_whole(engine):
    sampled = build(engine).sample(draw, 3, step=0, keep=lambda b: torch.zeros(len(b), dtype=torch.bool))
    assert sampled.metrics["rollout/kept_groups"] == 0 and len(sampled.batch) == 9


def test_failed_graders_drop_a_response_or_stop_the_run(engine):
    whole = build(engine).sample(draw, 6, step=0)
    texts = [
        Letters().decode(ids.tolist(), True)
        for ids in whole.batch.response_ids.split(whole.batch.response_lens.tolist())
    ]
    letter = next(c for c in map(chr, range(65, 127)) if 0 < sum(c in text for text in texts) < 9)
    lost = sum(letter in text for text in texts)
    sampled = build(engine, EvenLength(fails=letter)).sample(draw, 6, step=0)
    assert sampled.metrics["reward/grader_errors"] == lost
    assert len(sampled.batch) == sampled.batch.scalars["sampled_count"] == 18 - lost
    graded = torch.tensor([letter not in text for text in texts])
    assert sampled.metrics["reward/mean"] == pytest.approx(whole.batch.sequences["rewards"][graded].mean().item())
    assert sampled.metrics["tokens/generated"] == whole.metrics["tokens/generated"]
    with pytest.raises(RunFailed, match=rf"step 0: the grader failed on {lost} of 18 .* problem 1\d .*the grader died"):
        build(engine, strict(EvenLength(fails=letter))).sample(draw, 6, step=0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e39])
def test_a_reward_that_is_no_number_stops_the_run(engine, value):
    """Planted on the second response to each problem."""

    class Broken(EvenLength):
        def __call__(self, prompts, texts):
            scores = super().__call__(prompts, texts)
            return [scores[0], Score(value), *scores[2:]]

    with pytest.raises(RunFailed, match=r"step 4: the reward is -?(nan|inf|1e\+39) on response 1 to problem 10 "):
        build(engine, Broken()).sample(draw, 4, step=4)


def test_every_grader_failing_stops_the_run(engine):
    class Dead(Reward):
        def __call__(self, prompts, texts):
            return [Score(0.0, error="no sandbox")] * len(texts)

    with pytest.raises(RunFailed, match="6 of 6 responses.*no sandbox"):
        build(engine, Dead()).sample(draw, 2, step=0)


def test_shaping_stays_beside_the_verifiers_reward(engine):
    class Shaped(EvenLength):
        def __call__(self, prompts, texts):
            return [Score(0.5, shaping=len(text) / 8, correct=True) for text in texts]

    sampled = build(engine, Shaped()).sample(draw, 2, step=0)
    batch = sampled.batch
    assert batch.sequences["rewards"].eq(0.5).all() and batch.sequences["shaping"].gt(0).any()
    assert torch.equal(batch.shaped_rewards, 0.5 + batch.sequences["shaping"])
    assert batch.scalars["sampled_reward_sum"] == 0.5 * len(batch)  # what PIPO measures performance by
    assert sampled.metrics["reward/all_right_groups"] == 1.0


def test_contexts_are_in_the_order_of_their_responses(engine):
    """Each context has the numbers of its problem and sample, so that a wrong order would show."""
    seen = []

    def contexts(group: list[ScoredResponse]) -> list[ScoredResponse]:
        index = group[0].prompt.index
        seen.append(index)
        assert len(group) == 3
        return [replace(each, context=(index, each.sample) if each.sample else ()) for each in group]

    batch = build(engine, contexts=contexts).sample(draw, 4, step=0).batch
    assert sorted(seen) == [10, 11, 12, 13]
    assert batch.context_lens.tolist() == [0, 2, 2] * 4
    assert batch.context_ids.tolist() == [x for index in range(10, 14) for sample in (1, 2) for x in (index, sample)]
    assert build(engine).sample(draw, 4, step=0).batch.context_ids is None
