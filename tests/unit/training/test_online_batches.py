"""Sampling ahead: which weights generate which batch, whatever the timing, and the pending batches in a checkpoint."""

import time
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron_rft.data.stream import Stream
from megatron_rft.inference.hf.engine import HFEngine
from megatron_rft.inference.pool import EnginePool
from megatron_rft.training.online_batches import OnlineBatches, grader_errors
from megatron_rft.utils.errors import DataError, RunFailed
from tests.branching import branching
from tests.unit.inference.tiny import hf_stream
from tests.unit.rollout.test_sampler import SAMPLING, EvenLength, Letters, prompts, same

from megatron_rft.rollout.sampler import Sampler  # isort: skip

STEPS, COUNT = 5, 3
PROMPTS = prompts(7)


def weights(model, version: int):
    """Different weights for every step."""
    return ((name, tensor * (1 + version / 4)) for name, tensor in hf_stream(model))


class Member(HFEngine):
    """An engine in a thread of this process: cheap, and as slow as a test needs."""

    name, slow = "a member", 0.0

    def generate(self, requests, sampling):
        time.sleep(self.slow)
        yield from super().generate(requests, sampling)


class Branching(Member):
    """Its responses are episodes with segments."""

    def generate(self, requests, sampling):
        return branching(super().generate, requests, sampling)


class Weights:
    """Records what is sent, and when the engine was put to sleep."""

    def __init__(self, pool, model):
        self.pool, self.model, self.version, self.slept, self.asleep = pool, model, 0, 0, False

    def sent(self, version):
        return False

    def sleep(self):
        self.slept += 1

    def sleep_to_save(self): ...

    def wake(self): ...

    def send(self, version, verify=False):
        self.pool.load_weights(weights(self.model, version), version)
        return {}


def build(
    model, staleness: int, keep=None, rounds: int = 1, background: bool | None = None, member: type[Member] = Member
) -> OnlineBatches:
    pool = EnginePool([member(model.config)], torch.float32)
    pool.load_weights(weights(model, 0), 0)
    background = staleness > 0 if background is None else background
    options = {"group_size": 3, "seed": 1, "keep": keep, "max_rounds": rounds, "background": background}
    sampler = Sampler(pool, SAMPLING, EvenLength(), Letters(), **options)
    of_run = SimpleNamespace(stream=Stream(PROMPTS), total_steps=STEPS, phases=nullcontext)
    return OnlineBatches(of_run, sampler, Weights(pool, model), COUNT, staleness)


def run(batches: OnlineBatches, first: int = 1, last: int = STEPS):
    """The batches of steps first .. last, from a loop like the trainer's."""
    found = []
    for step in range(first, last + 1):
        batches.next(step)
        found.append(batches.sampled)
        batches.publish(step)
    assert batches.weights.slept == len(found)
    return found


def versions(found) -> list[list[int]]:
    return [sampled.batch.sequences["weight_version"].unique().tolist() for sampled in found]


def test_synchronous_batches_are_of_the_newest_weights(model):
    found = run(build(model, 0))
    assert versions(found) == [[0], [1], [2], [3], [4]]
    assert [sampled.metrics["rollout/staleness"] for sampled in found] == [0] * 5


def test_a_batch_that_was_begun_before_is_the_same(model):
    """The trainer does other work while the batch is generated, and the engine has the newest weights. With n > 0 the
    trainer has already worked; without a thread nothing is generated before `next`."""
    begun, plain = build(model, 0, background=True), build(model, 0)
    for step in (1, 2):
        assert begun.begin(step) and not plain.begin(step)
        assert same(begun.next(step), plain.next(step))
        begun.publish(step), plain.publish(step)
    assert not build(model, 1).begin(1)


def disagree(batch):
    """Groups with unequal rewards, as DAPO requires."""
    rewards, groups = batch.sequences["rewards"], batch.groups
    return torch.stack([rewards[groups == group].std(correction=0) > 0 for group in groups])  # [B]


@pytest.mark.parametrize("keep, rounds", [(None, 1), (disagree, 3)])
def test_one_step_off_is_the_same_whatever_the_clock_says(model, keep, rounds):
    quick, slow = build(model, 1, keep, rounds), build(model, 1, keep, rounds)
    slow.sampler.engine.members[0].slow = 0.05
    found, again = run(quick), run(slow)
    assert versions(found) == [[0], [0], [1], [2], [3]]
    assert [sampled.metrics["rollout/staleness"] for sampled in found] == [0, 1, 1, 1, 1]
    assert all(same(one.batch, other.batch) for one, other in zip(found, again, strict=True))
    assert not quick.pending


@pytest.mark.parametrize("member", [Member, Branching])
def test_a_checkpoint_keeps_what_is_under_way(model, member):
    whole = run(build(model, 1, disagree, 3, member=member))
    assert (whole[2].batch.segment_of is not None) == (member is Branching)
    first = build(model, 1, disagree, 3, member=member)
    run(first, last=2)
    state = first.state() | {"mu": torch.ones(1)}
    assert list(first.pending) == [3]

    resumed = build(model, 1, disagree, 3, member=member)
    assert resumed.restore(state).keys() == {"mu"}
    resumed.run.stream.position = first.run.stream.position
    resumed.sampler.engine.load_weights(weights(model, 2), 2)
    rest = run(resumed, first=3)
    assert all(same(one.batch, other.batch) for one, other in zip(rest, whole[2:], strict=True))
    texts = [[(r.text, r.score.reward) for r in step.rollouts] for step in (rest[0], whole[2])]
    assert texts[0] == texts[1]
    untimed = [{k: v for k, v in each.metrics.items() if "seconds" not in k} for each in (rest[1], whole[3])]
    assert untimed[0].keys() == untimed[1].keys()


@pytest.mark.parametrize("change", ["gone", "edited", "reordered"])
def test_a_row_that_changed_is_named(model, change):
    """A resumed run reads data.train again, and the responses that were sampled ahead belong to its rows."""
    first = build(model, 1)
    run(first, last=2)
    state, resumed = first.state(), build(model, 1)
    row = first.pending[3][0].rollouts[0].prompt.index
    items = {prompt.index: prompt for prompt in PROMPTS}
    items["added"] = replace(PROMPTS[0], index=999)  # which no response is to
    resumed.run.stream.items = list(items.values())
    resumed.restore(state)
    if change == "gone":
        del items[row]
    else:
        other = next(prompt for prompt in PROMPTS if prompt.index != row)
        items[row] = replace(items[row], answer="9") if change == "edited" else replace(other, index=row)
    resumed.run.stream.items = list(items.values())
    with pytest.raises(DataError, match=f"data.train: row {row + 1}, whose responses are in the checkpoint, is no"):
        resumed.restore(state)


def test_weights_that_do_not_arrive_are_noticed(model):
    batches = build(model, 1)
    batches.next(1), batches.drain(), batches.next(2), batches.drain()
    with pytest.raises(RunFailed, match="weights that are 2 versions old, and rollout.staleness is 1"):
        batches.next(3)


def test_the_first_failure_of_a_grader_is_told_with_its_exception():
    def rollout(error):
        return SimpleNamespace(score=SimpleNamespace(error=error))

    told = grader_errors([rollout(None), rollout("mine.py:f: KeyError: 'x'"), rollout("another")], step=3)
    assert told.startswith("step 3: the grader failed on 2 of 3 responses, which are left out (reward.max_error_share)")
    assert "first with mine.py:f: KeyError: 'x'. Each step's line counts them" in told
