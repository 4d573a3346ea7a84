"""The refiner: which responses it gets, how its texts are processed, and that a batch's pairs score higher."""

import math

import pytest

from examples.quickstart import arithmetic
from megatron_rft.config.constraint import DynamicOptions
from megatron_rft.inference.engine import Group, Sampling, request_seed
from megatron_rft.records import Prompt, Response, Score
from megatron_rft.rewards.base import Reward
from megatron_rft.rollout.refiner import (
    AT_MAXIMUM,
    GRADER_FAILED,
    NOT_CHOSEN,
    NOT_TRAINED,
    TOO_LONG,
    Refiner,
    clean,
)
from megatron_rft.rollout.sampler import ScoredResponse
from tests.made import WholeStep, dynamic, made
from tests.unit.inference.tiny import build_engine, build_model

EOS = 1
TOKENIZER = arithmetic.tokenizer()


def ids(text: str, end: bool = True) -> tuple[int, ...]:
    return (*TOKENIZER.encode(text, add_special_tokens=False), *((EOS,) if end else ()))


@pytest.mark.parametrize(
    "raw, response, wanted",
    [
        ("the same", "the same", "the same"),
        (" kept as it is\n", "x", " kept as it is\n"),
        ("<|im_start|>assistant\nfixed<|im_end|>", "x", "fixed"),
        ("<|start_header_id|>assistant<|end_header_id|>\n\nfixed<|eot_id|>", "x", "fixed"),
        ("```python\nprint(1)\n```", "print(2)", "print(1)"),
        ("```\nprint(1)\n```\n", "print(2)", "print(1)"),
        ("```python\nprint(1)\n```", "```python\nprint(2)\n```", "```python\nprint(1)\n```"),
        ("```python\na\n```\nand\n```\nb\n```", "x", "```python\na\n```\nand\n```\nb\n```"),
        ("Here: ```python\na\n```", "x", "Here: ```python\na\n```"),
        ("", "x", ""),
    ],
)
def test_clean(raw, response, wanted):
    assert clean(raw, response) == wanted
    assert clean(wanted, response) == wanted


class Written:
    """An engine that answers as the text in its prompt instructs."""

    def __init__(self, says: dict[str, str]):
        self.says, self.requests = says, []

    def generate(self, requests, sampling):
        self.requests += requests
        for request in requests[::-1]:
            asked = TOKENIZER.decode(list(request.prompt_ids))
            text = next(out for key, out in self.says.items() if f"[{key}]" in asked)
            yield Group(request.id, (Response(ids(text), (), "stop", 0),))


def refiner(says: dict[str, str] | None = None, maximum: float = 1.0, most_tokens=math.inf, **named) -> Refiner:
    return Refiner(
        Written(says or {}),
        Sampling(20, stop_token_ids=(EOS,)),
        TOKENIZER,
        lambda prompt, text: list(ids(text, end=False)),
        "{question}[{response}]{reward}",
        maximum,
        lambda *parts: request_seed(7, *parts),
        DynamicOptions(eta=1e-3, **named),
        most_tokens,
    )


def rollout(text: str, reward: float, sample: int = 0, **named) -> ScoredResponse:
    response = Response(ids(text), (0.0,) * (len(text) + 1), "stop", 0)
    score = Score(reward, **named)
    return ScoredResponse(3, sample, Prompt(9, (5,), "Q", "A", question="Q"), response, text, score)


def test_who_is_refined():
    group = [rollout("a", r, i) for i, r in enumerate((1.0, 0.5, -1.0, 0.0, math.nan, 0.2))]
    group.append(rollout("a", 0.0, 6, error="the grader died"))
    tasks, left = refiner().choose(group, 1, [True, True, True, False, True, True, True])
    assert [task.rollout.key for task in tasks] == [(3, 1), (3, 2), (3, 5)]
    assert left == {0: AT_MAXIMUM, 3: NOT_TRAINED, 4: GRADER_FAILED, 6: GRADER_FAILED}
    assert TOKENIZER.decode(list(tasks[0].request.prompt_ids)) == "Q[a]0.5"
    assert len(refiner(maximum=math.inf).choose(group, 1, [True] * 7)[0]) == 5  # 1.0 may be surpassed
    assert len(refiner(filter=False).choose(group, 1, [True] * 7)[0]) == 5  # and a copy of it learnt
    tasks, left = refiner(first=2).choose(group, 1, [True] * 7)
    assert [task.rollout.key[1] for task in tasks] == [1, 2] and left[5] == NOT_CHOSEN
    tasks, left = refiner(most_tokens=22).choose(group, 1, [True] * 7)
    assert not tasks and left[1] == TOO_LONG


def test_a_share_is_chosen_by_the_seed():
    group = [rollout("a", 0.0, i) for i in range(400)]
    found = [refiner(share=0.25).choose(group, step, [True] * 400)[0] for step in (1, 1, 2)]
    keys = [[task.rollout.key for task in tasks] for tasks in found]
    assert keys[0] == keys[1] != keys[2] and 70 < len(keys[0]) < 130


def test_the_tokens_of_a_refined_text():
    """A copy has the response's tokens, a cleaned text is tokenised, other texts have the engine's tokens."""
    says = {"ab": "ab", "cd": "ce", "ef": "```\nxyz\n```", "gh": ""}
    some = refiner(says)
    group = [rollout(text, 0.0, i) for i, text in enumerate(says)]
    tasks, _ = some.choose(group, 1, [True] * 4)
    grader = lambda prompts, texts: [Score(float(len(text) > 2)) for text in texts]  # noqa: E731
    found = some.grade(tasks, some.write(tasks), grader)
    assert [each.text for each in found] == ["ab", "ce", "xyz", ""]
    assert [each.token_ids for each in found] == [ids("ab"), ids("ce"), ids("xyz"), (EOS,)]
    assert [each.verbatim for each in found] == [True, False, False, False]
    assert [each.kept for each in found] == [False, False, True, False]
    broken = some.grade(tasks, some.write(tasks), lambda prompts, texts: [Score(math.inf)] * len(texts))
    assert all(each.score.error and not each.kept for each in broken)


class Digits(Reward):
    """The number of digits in the text, up to two."""

    maximum = 2.0

    def __call__(self, prompts, texts):
        return [Score(float(min(sum(c.isdigit() for c in text), 2))) for text in texts]


def sampled(overlap: bool, keep=None, group_size: int = 4, maximum: float = 2.0, **named):
    """Two real engines with random weights and the tokenizer's characters."""
    policy, frozen = (build_engine(build_model("llama", seed=seed, scale=1.0)) for seed in (1, 2))
    sampling = Sampling(12, stop_token_ids=(2,))
    some = Refiner(
        frozen,
        sampling,
        Digit(),
        lambda prompt, text: [3 + (ord(c) % 60) for c in text],
        "{question}{response}",
        maximum,
        lambda *parts: request_seed(7, *parts),
        DynamicOptions(eta=1e-3, overlap=overlap, **named),
    )
    sampler = WholeStep(policy, sampling, Digits(), Digit(), group_size=group_size, seed=1, refiner=some)
    prompts = [Prompt(i, (5 + i, 6), "p", "", question=f"{i}") for i in range(6)]
    return sampler.sample(lambda n: prompts[:n], 6, step=1, keep=keep)


class Digit:
    """Token i is the character i; some are digits."""

    all_special_ids = [2]

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(i) for i in ids if i != 2)

    def encode(self, text, add_special_tokens=False):
        return [ord(c) for c in text]


def test_pairs_in_the_batch_score_higher():
    found = sampled(overlap=True)
    batch = found.batch
    assert batch.refined_lens.gt(0).any() and batch.refined_lens.eq(0).any()
    kept = [each for each in found.rollouts if each.refined and each.refined.kept]
    assert len(kept) == int((batch.refined_lens > 0).sum()) == found.metrics["constraint/pairs"]
    assert all(each.refined.score.reward > each.score.reward for each in kept)
    chosen = batch.select(batch.refined_lens > 0)
    assert chosen.refined_ids.tolist() == [token for each in kept for token in each.refined.token_ids]
    at_most = sum(each.score.reward == 2 for each in found.rollouts)
    assert found.metrics["constraint/skipped"] == at_most > 0
    assert found.metrics["constraint/refined"] == 24 - at_most
    assert found.metrics["constraint/improved"] == len(kept) / 24


@pytest.mark.parametrize("named", [{}, {"maximum": math.inf}])
def test_overlap_and_skipping_do_not_change_the_batch(named):
    """The batch is the same with and without overlap and skipping."""
    state = sampled(overlap=True).batch.state_dict()
    for overlap in (True, False):
        other = sampled(overlap, **named).batch.state_dict()
        assert state.keys() == other.keys()
        assert all((state[name] == other[name]).all() for name in state)


def test_groups_that_agree_are_refined_where_that_is_asked_for():
    """Groups of one have equal rewards, so DAPO leaves all out. The refiner improves one, which is then kept."""
    found = {}
    for agreeing in (False, True):
        objective = dynamic(made("dapo"), eta=0.1, agreeing=agreeing)
        found[agreeing] = sampled(overlap=False, keep=objective.keep, group_size=1, agreeing=agreeing)
    left_out, refined = found[False], found[True]
    assert {each.unrefined for each in left_out.rollouts} == {NOT_TRAINED}
    assert left_out.metrics["rollout/kept_groups"] == 0 and refined.metrics["rollout/kept_groups"] == 1
    (helped,) = [each.prompt_index for each in refined.rollouts if each.refined]
    assert refined.batch.groups.tolist() == [helped] and refined.batch.refined_lens.tolist() != [0]
