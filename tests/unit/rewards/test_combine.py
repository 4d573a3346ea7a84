import pytest

from megatron_rft.config.rewards import SECTIONS, RewardOptions
from megatron_rft.records import Prompt, Score
from megatron_rft.rewards.base import Reward
from megatron_rft.rewards.combine import SumReward, Term
from megatron_rft.rewards.registry import build
from megatron_rft.utils.errors import DataError

RIGHT, WRONG = "<think>x</think><answer>A</answer>", "<think>x</think><answer>B</answer>"


def prompts(*fields: dict) -> list[Prompt]:
    return [Prompt(i, (1,), "", "A", each) for i, each in enumerate(fields)]


def options(**values) -> RewardOptions:
    return SECTIONS[values["kind"]].model_validate(values)


def test_a_weighted_sum_keeps_shaping_apart():
    reward = build(
        options(
            kind="sum",
            parts=[
                {"kind": "choice", "weight": 2.0},
                {"kind": "format", "tags": ["think", "answer"], "weight": 0.5, "name": "form"},
                {"kind": "format", "tags": ["answer"], "weight": 0.25, "shaping": True, "name": "terse"},
            ],
        )
    )
    right, wrong, terse = reward(prompts({}, {}, {}), [RIGHT, WRONG, "<answer>A</answer>"])
    assert (right.reward, right.shaping) == (2.5, 0.0)
    assert (wrong.reward, wrong.shaping) == (0.5, 0.0) and "choice: B is wrong" in wrong.reason
    assert (terse.reward, terse.shaping) == (2.0, 0.25)
    assert terse.details["form"]["reward"] == 0.0 and reward.answer(prompts({})[0], RIGHT) == "A"
    reward.close()


def test_the_shaping_of_a_part_has_its_weight():
    score = SumReward([Term("a", Fixed(Score(1.0, shaping=0.5)), 2.0), Term("b", Fixed(Score(0.0, shaping=0.25)))])
    assert score(prompts({}), ["x"])[0].shaping == 1.25


class Fixed(Reward):
    """A verifier with a given score."""

    maximum = 4.0

    def __init__(self, score: Score):
        self.score = score

    def __call__(self, prompts, texts):
        return [self.score] * len(texts)

    def answer(self, prompt, text):
        return None

    def close(self):
        pass


def total(*scores: Score) -> Score:
    parts = [Term(str(i), Fixed(score)) for i, score in enumerate(scores)]
    return SumReward(parts)(prompts({}), ["x"])[0]


def test_an_error_of_a_part_is_an_error():
    assert total(Score(1.0), Score(0.0, error="gone")).error == "1: gone"


def test_the_maximum_of_sums_and_rows():
    assert (
        SumReward([Term("a", Fixed(Score(0.0)), 0.5), Term("b", Fixed(Score(0.0)), 9.0, shaping=True)]).maximum == 2.0
    )
    assert SumReward([Term("a", Fixed(Score(0.0)), -1.0)]).maximum == float("inf")
    assert build(options(kind="by_row", kinds={"a": {"kind": "tool"}, "b": {"kind": "choice"}})).maximum == 4.0


def test_right_is_what_the_verifiers_say():
    assert total(Score(4.0, correct=True), Score(0.0)).right
    assert not total(Score(4.0, correct=False), Score(1.0, correct=True)).right
    assert total(Score(0.5), Score(0.5)).right  # without a verdict: by the reward


def test_form_does_not_make_a_wrong_answer_right():
    reward = build(options(kind="sum", parts=[{"kind": "math"}, {"kind": "format", "tags": ["think", "answer"]}]))
    form = "<think>x</think><answer>{}</answer>"
    scores = reward([Prompt(0, (1,), "", "3")] * 3, [form.format(3), form.format(4), "<answer>3</answer>"])
    assert [(each.reward, each.right) for each in scores] == [(2.0, True), (1.0, False), (1.0, True)]


def test_each_row_has_its_kind():
    reward = build(
        options(
            kind="by_row",
            field="task",
            kinds={"pick": {"kind": "choice"}, "form": {"kind": "format", "tags": ["answer"]}},
        )
    )
    rows = prompts({"task": "form"}, {"task": "pick"}, {"task": "form"})
    scores = reward(rows, [RIGHT, RIGHT, "<answer>B</answer>"])
    assert [score.reward for score in scores] == [0.0, 1.0, 1.0]
    with pytest.raises(DataError, match="row 1 has task='other'; reward.kinds has pick, form"):
        reward(prompts({"task": "other"}), [RIGHT])
    with pytest.raises(DataError, match=r"row 1 has task=\['pick'\]"):
        reward(prompts({"task": ["pick"]}), [RIGHT])
