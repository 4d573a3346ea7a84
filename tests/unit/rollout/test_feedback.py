"""The feedback that the self-teacher gets on each response."""

import pytest

from examples.quickstart import arithmetic
from megatron_rft.config.algorithms.online import SDPO
from megatron_rft.records import Prompt, Response, Score
from megatron_rft.rollout.feedback import Feedback
from megatron_rft.rollout.sampler import ScoredResponse

PROMPT = Prompt(0, (1,), "<chat>2+2?</chat>", "4", {"solution": "the sum is 4"}, "2+2?")
TEXTS = ["5 ", "four", "4", "banana"]
SCORES = [Score(0.0, "5 is not 4"), Score(1.0), Score(1.0), Score(0.0)]


class Letters:
    """A tokenizer whose tokens are letters."""

    def encode(self, text, add_special_tokens):
        return list(text)

    def decode(self, ids):
        return "".join(ids)


def told(texts=TEXTS, scores=SCORES, prompt=PROMPT, sources=("sibling", "error", "solution"), limit=100, said=()):
    """The contexts as text: this encoder returns code points."""
    texts_around = {"solution_template": "right: {}", "error_template": "wrong: {}"}
    used = {"solution_template": {"solution", "sibling"}, "error_template": {"error"}}
    options = {name: text for name, text in texts_around.items() if used[name] & set(sources)}
    options |= {"max_feedback_tokens": limit, "teacher_template": "{feedback} / {prompt}"}
    feedback = Feedback(SDPO(feedback=list(sources), **options), lambda _, text: [ord(c) for c in text], Letters())
    response = Response((), (), "stop", 0, said=said)
    group = [ScoredResponse(0, i, prompt, response, *each) for i, each in enumerate(zip(texts, scores, strict=True))]
    return ["".join(map(chr, each.context)) for each in feedback(group)]


def test_a_right_sibling_and_the_reason():
    """The sibling is the next right response in sample order, never the same one. Right responses get no reason, nor do
    wrong ones without one. The reference solution is used only without a right sibling."""
    assert told() == [
        "right: four\n\nwrong: 5 is not 4 / 2+2?",
        "right: 4 / 2+2?",
        "right: four / 2+2?",
        "right: four / 2+2?",
    ]


def test_the_reference_solution_where_nobody_is_right():
    wrong = [Score(0.0, "no")] * 4
    assert told(scores=wrong)[0] == "right: the sum is 4\n\nwrong: no / 2+2?"
    assert told(scores=[Score(1.0), *wrong[1:]], sources=("solution",)) == ["", *["right: the sum is 4 / 2+2?"] * 3]


def test_sometimes_there_is_nothing_to_say():
    bare = Prompt(0, (1,), "2+2?", "4", {}, "2+2?")
    assert told(["4"], [Score(1.0)]) == [""]
    assert told(["5"], [Score(0.0)], bare) == [""]
    assert told(["5", "4"], [Score(0.0), Score(1.0, error="crashed")], bare) == ["", ""]


def test_what_the_environment_said_comes_before_the_reason():
    assert told(sources=("error",), said=("no such file",))[0] == "wrong: no such file\n5 is not 4 / 2+2?"


def test_what_is_told_is_cut():
    assert told(limit=9)[0] == "right: fo / 2+2?"
    for limit, expected in ((3, "3 (1) +5"), (9, "3 (1) +5=8")):
        feedback = Feedback(SDPO(max_feedback_tokens=limit), lambda *_: [], arithmetic.tokenizer())
        assert feedback.cut("3 (1) +5=8") == expected


@pytest.mark.parametrize("sources", [("sibling",), ("error",), ("solution",)])
def test_each_source_alone(sources):
    """Response 0 is wrong and has all three sources."""
    expected = {"sibling": "right: four", "error": "wrong: 5 is not 4", "solution": "right: the sum is 4"}
    assert told(sources=sources)[0] == f"{expected[sources[0]]} / 2+2?"
