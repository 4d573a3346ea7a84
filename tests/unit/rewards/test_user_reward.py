import pytest

from megatron_rft.config.rewards import OwnOptions, SumOptions
from megatron_rft.records import Prompt, Score
from megatron_rft.rewards.registry import build
from megatron_rft.utils.errors import CodeError, ConfigError

CODE = """
import numpy as np
from megatron_rft.records import Score
calls = []
def right(prompt, text):
    return prompt.answer in text
def scored(prompt, text):
    return Score(0.5, reason="half", correct=False)
def broken(prompt, text):
    calls.append(text)
    return 1 / 0
def odd(prompt, text):
    return None
def one(text):
    return 1.0
def many(prompts, texts):
    calls.append(len(texts))
    return [prompt.answer in text for prompt, text in zip(prompts, texts)]
def few(prompts, texts):
    return [1.0]
def broken_list(prompts, texts):
    return 1 / 0
async def later(prompt, text):
    return 1.0
class Later:
    async def __call__(self, prompt, text):
        return 1.0
later_too = Later()
def words(prompt, text):
    return Score("1.0")
def surrogate(prompt, text):
    return Score(1.0, reason="\\ud800")
def a_set(prompt, text):
    return Score(1.0, details={"seen": {1, 2}})
def numpys(prompt, text):
    return Score(np.float32(1), correct=np.bool_(True), details={"parts": np.ones(2) * [1, 2], "n": np.int64(3)})
def numpy(prompt, text):
    return np.float16(0.5)
"""
PROMPT = Prompt(0, (1,), "2+2=", "4")


@pytest.fixture
def rewards(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(CODE)
    return lambda name, **options: build(OwnOptions(function=f"mine.py:{name}", **options))


def test_a_number_or_a_score(rewards):
    prompts = [PROMPT, PROMPT]
    assert rewards("right")(prompts, ["it is 4", "no"]) == [Score(1.0), Score(0.0)]
    assert rewards("scored")([PROMPT], [""]) == [Score(0.5, reason="half", correct=False)]
    assert rewards("right").maximum == float("inf") and rewards("right", maximum=1.0).maximum == 1.0


def test_what_fails_is_an_error_and_no_zero(rewards):
    broken = rewards("broken")
    (score,) = broken([PROMPT], ["x"])
    assert score.error == "mine.py:broken: ZeroDivisionError: division by zero"
    assert broken.function.__globals__["calls"] == ["x", "x"]  # asked again


ODD = {
    "odd": r"odd \(mine.py, line 12\) returned None: return a number or a Score",
    "words": r"Score: '1.0' is no number: reward and shaping are numbers",
    "surrogate": r"surrogate \(mine.py, line 31\) returned Score\(.* half of a surrogate pair",
    "a_set": r"a_set \(mine.py, line 33\) returned Score\(.* its details are numbers, texts, lists and dicts",
}


@pytest.mark.parametrize("name", ODD)
def test_what_can_never_be_used_ends_the_run(rewards, name):
    with pytest.raises(CodeError, match=ODD[name]):
        rewards(name)([PROMPT], ["x"])


def test_numbers_of_numpy_are_numbers(rewards):
    (score,) = rewards("numpys")([PROMPT], ["x"])
    assert score == Score(1.0, correct=True, details={"parts": [1.0, 2.0], "n": 3}) and score.correct is True
    assert rewards("numpy")([PROMPT], ["x"]) == [Score(0.5)]


def test_a_function_of_lists_is_called_once(rewards):
    many = rewards("many")
    assert many([PROMPT, PROMPT], ["it is 4", "no"]) == [Score(1.0), Score(0.0)]
    assert many.function.__globals__["calls"] == [2]
    with pytest.raises(CodeError, match="few .* returned .1.0.: return a list of 2 numbers or Scores"):
        rewards("few")([PROMPT, PROMPT], ["", ""])
    scores = rewards("broken_list")([PROMPT, PROMPT], ["", ""])
    assert [each.error for each in scores] == ["mine.py:broken_list: ZeroDivisionError: division by zero"] * 2


def test_as_a_part_of_a_sum(rewards):
    part = {"kind": "own", "function": "mine.py:right", "weight": 0.5, "shaping": True}
    section = SumOptions.model_validate({"kind": "sum", "parts": [{"kind": "math"}, part]})
    reward = build(section)
    (score,) = reward([PROMPT], ["4"])
    assert (score.reward, score.shaping) == (1.0, 0.5) and SumOptions.model_validate(section.model_dump()) == section


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("rigth", "Did you mean 'right'"),
        ("calls", "is not a callable object"),
        ("one", "called with (prompt, text)"),
        ("later", "is async, and nothing awaits it"),
        ("later_too", "is async"),
    ],
)
def test_what_cannot_be_used_is_refused(rewards, name, problem):
    with pytest.raises(ConfigError, match="reward.function") as error:
        rewards(name)
    assert problem in str(error.value)
