"""A user's function as a reward, in a process of its own: results, failures of single responses, broken contracts."""

import json
import math
import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from threading import Event, Lock

import pytest

from megatron_rft.config.rewards import ByRowOptions, OwnOptions, SumOptions
from megatron_rft.records import Prompt, Score
from megatron_rft.rewards.registry import build
from megatron_rft.rewards.user_reward import RewardProcess
from megatron_rft.utils.errors import CodeError, ConfigError
from tests.unit.test_docs import ROOT, files_of

FUNCTIONS = Path(__file__).with_name("user_functions.py")
PROMPT = Prompt(0, (1,), "2+2=", "4", {"answer": "4", "level": 3})
OTHER = Prompt(7, (1,), "3+3=", "6", {"answer": "6", "level": 5})


@pytest.fixture
def rewards(tmp_path, monkeypatch):
    """A function that builds the reward of a function in user_functions.py; its processes end with the test."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FUNCTIONS.read_text())
    made = []

    def make(name: str, **options):
        made.append(build(OwnOptions(function=f"mine.py:{name}", **options)))
        return made[-1]

    yield make
    for each in made:
        each.close()


def errors(scores: list[Score]) -> list[str | None]:
    return [score.error for score in scores]


def line(name: str) -> int:
    """Of a function in user_functions.py."""
    (found,) = [i for i, text in enumerate(FUNCTIONS.read_text().splitlines(), 1) if f"def {name}(" in text]
    return found


def test_a_number_or_a_score(rewards):
    prompts = [PROMPT, PROMPT]
    assert rewards("right")(prompts, ["it is 4", "no"]) == [Score(1.0), Score(0.0)]
    assert rewards("scored")([PROMPT], [""]) == [Score(0.5, reason="half", correct=False)]
    assert rewards("right").maximum == math.inf and rewards("right", maximum=1.0).maximum == 1.0
    assert rewards("nothing", maximum=1.0)([], []) == []


def test_a_reward_above_the_maximum_is_refused(rewards):
    assert rewards("numpy_number", maximum=0.5)([PROMPT], ["x"]) == [Score(0.5)]
    message = r"mine.py:numpy_number: problem 7, response 'x': the reward is 0.5, above its maximum, 0.4: set a higher"
    with pytest.raises(CodeError, match=message):
        rewards("numpy_number", maximum=0.4)([OTHER], ["x"])


def test_numbers_of_numpy_are_numbers(rewards):
    (score,) = rewards("numpys")([PROMPT], ["x"])
    assert score == Score(1.0, correct=True, details={"parts": [1.0, 2.0], "n": 3}) and score.correct is True
    assert rewards("numpy_number")([PROMPT], ["x"]) == [Score(0.5)]


def test_what_fails_is_an_error_and_no_zero(rewards):
    where = "mine.py:broken: problem 7, response 'x': "
    scores = rewards("broken")([PROMPT, OTHER], ["x", "x"])
    assert scores[1].error == f"{where}ZeroDivisionError: tried 4 times (mine.py, line {line('broken') + 2})"
    assert "SystemExit: 4 (mine.py, line" in rewards("exits")([PROMPT], ["x"])[0].error
    assert "KeyboardInterrupt:  (mine.py, line" in rewards("interrupts")([PROMPT], ["x"])[0].error
    big = rewards("big", memory_mb=600)([PROMPT], ["x"])[0].error
    assert re.search(r"MemoryError:  \(mine.py, line \d+\), reward.memory_mb", big)
    assert rewards("big")([PROMPT], ["x"]) == [Score(1.0)]


def test_it_runs_on_the_main_thread_of_one_process_that_stays(rewards):
    reward = rewards("alarms")
    assert [reward([PROMPT], ["x"]) for _ in range(3)] == [[Score(1.0)], [Score(2.0)], [Score(3.0)]]


@pytest.mark.parametrize("name", ["dies", "dies_later"])
def test_a_dead_process_costs_one_response(rewards, name):
    scores = rewards(name, processes=2)([PROMPT] * 3 + [OTHER] * 3, list("abdacb"))
    assert [score.reward for score in scores] == [1.0, 1.0, 0.0, 1.0, 1.0, 1.0]
    assert errors(scores)[2] == f"mine.py:{name}: problem 0, response 'd': its process ended with status 7"
    assert errors(scores)[:2] + errors(scores)[3:] == [None] * 5


@pytest.fixture
def patient(monkeypatch):
    """Only 'h' can be late, however long another response waits for a processor."""
    ask, receive = RewardProcess._ask, RewardProcess.receive

    def asks(self, tasks):
        self.asked = tasks
        return ask(self, tasks)

    def receives(self, grace_s):
        first = next(task for task in self.asked if not task.score.done())
        return receive(self, grace_s if first.text == "h" else 300.0)

    monkeypatch.setattr(RewardProcess, "_ask", asks)
    monkeypatch.setattr(RewardProcess, "receive", receives)


@pytest.mark.parametrize("name", ["hangs", "waits", "blocks"])
def test_a_late_response_costs_one_response(rewards, patient, name):
    scores = rewards(name, timeout_s=1.0)([PROMPT] * 2 + [OTHER], list("ahb"))
    assert [score.reward for score in scores] == [1.0, 0.0, 1.0] and errors(scores)[::2] == [None, None]
    assert scores[1].error.endswith("response 'h': gave no answer within 1 s (reward.timeout_s)")


def test_many_calls_of_an_async_function_wait_at_once(rewards):
    for options, wanted in (({}, 32), ({"at_once": 5}, 5)):
        scores = rewards("most_at_once", **options)([PROMPT] * 16 + [OTHER] * 16, ["x"] * 32)
        assert max(score.reward for score in scores) == wanted


def test_groups_that_wait_are_graded_together(rewards):
    """While one is graded, three others come."""
    reward, graded = rewards("most_at_once"), Event()
    reward.members[0].thread.submit(graded.wait)
    later = [reward.begin([PROMPT] * 4, ["x"] * 4) for _ in range(3)]
    graded.set()
    assert max(score.reward for score in later[-1]()) == 12.0


def test_a_function_of_lists_gets_the_responses_to_one_problem(rewards):
    scores = rewards("many")([PROMPT, PROMPT, OTHER], ["it is 4", "no", "6"])
    assert scores == [Score(1.0, reason="2"), Score(0.0, reason="2"), Score(1.0, reason="1")]
    assert rewards("many_later")([PROMPT, PROMPT], ["4", "5"]) == [Score(1.0), Score(0.0)]
    scores = rewards("broken_list")([PROMPT, PROMPT], ["", ""])
    assert all("mine.py:broken_list: problem 0, response '': ZeroDivisionError" in each for each in errors(scores))


def test_a_dead_process_costs_an_async_function_of_lists_one_problem(rewards):
    """All problems wait at once, and any of them may have ended it: halves find it."""
    prompts = [replace(PROMPT, index=i) for i in range(5) for _ in range(2)]
    scores = rewards("dies_with_lists")(prompts, list("aabbcdeeff"))
    assert [score.reward for score in scores] == [1.0] * 4 + [0.0] * 2 + [1.0] * 4
    reason = "mine.py:dies_with_lists: problem 2, response '{}': its process ended with status 7"
    assert errors(scores) == [None] * 4 + [reason.format("c"), reason.format("d")] + [None] * 4


ODD = {
    "odd": "returned None: return a number or a Score",
    "text": "returned '1.0': return a number or a Score",
    "surrogate": "returned Score(",
    "a_set": "returned Score(",
    "few": "returned [1.0]: return a list of 2 numbers or Scores, one for each response",
    "a_dict": "returned {'score': 1.0}: return Score(result[\"score\"], details=result)",
}


@pytest.mark.parametrize("name", ODD)
def test_what_can_never_be_used_ends_the_run(rewards, name):
    with pytest.raises(CodeError) as error:
        rewards(name)([PROMPT, PROMPT], ["x", "y"])
    where = f"mine.py:{name}: problem 0, response 'x': {name} (mine.py, line {line(name)}) "
    assert str(error.value).startswith(where + ODD[name]), error.value


def test_a_score_of_words_is_refused(rewards):
    with pytest.raises(CodeError, match=r"problem 0, response 'x': Score: '1.0' is no number: reward and shaping are"):
        rewards("words")([PROMPT], ["x"])


@pytest.mark.parametrize("correct", [0.5, 2, math.nan, "yes"])
def test_correct_is_true_or_false(correct):
    with pytest.raises(CodeError, match="Score: .*: reward and shaping are numbers, correct is True, False or None"):
        Score(1.0, correct=correct)


def test_random_numbers_depend_on_problem_and_response_alone(rewards):
    drawn = [score.reward for score in rewards("draws")([PROMPT, PROMPT, OTHER], ["a", "b", "a"])]
    assert len(set(drawn)) == 3
    assert [score.reward for score in rewards("draws")([OTHER, PROMPT], ["a", "a"])] == [drawn[2], drawn[0]]


def test_as_a_part_of_a_sum_and_of_rows(rewards):
    part = {"kind": "own", "function": "mine.py:right", "weight": 0.5, "shaping": True}
    section = SumOptions.model_validate({"kind": "sum", "parts": [{"kind": "math"}, part]})
    with closing(build(section)) as reward:
        (score,) = reward([PROMPT], ["4"])
    assert (score.reward, score.shaping) == (1.0, 0.5) and SumOptions.model_validate(section.model_dump()) == section
    kinds = {"half": {"kind": "own", "function": "mine.py:scored"}, "sum": {"kind": "math"}}
    half, math = replace(PROMPT, fields={"task": "half"}), replace(OTHER, fields={"task": "sum"})
    with closing(build(ByRowOptions.model_validate({"kind": "by_row", "field": "task", "kinds": kinds}))) as reward:
        assert [score.reward for score in reward([half, math, half], ["4", "6", "4"])] == [0.5, 1.0, 0.5]


def test_functions_of_trl_and_verl(rewards):
    prompts, texts = [PROMPT, PROMPT], ["it is 4", "no"]
    right = [Score(1.0), Score(0.0)]
    assert rewards("as_trl", signature="trl")(prompts, texts) == right
    assert rewards("as_trl_chat", signature="trl_chat")(prompts, texts) == right
    assert rewards("as_trl_later", signature="trl")(prompts, texts) == right
    one, other = rewards("as_verl", signature="verl")(prompts, texts)
    assert (one.reward, one.correct, one.details["pred"]) == (1.0, True, "it is 4") and other.correct is False
    assert rewards("as_verl_number", signature="verl")(prompts, texts) == right
    with pytest.raises(CodeError, match="missing a required argument: 'solution'; the rows have answer, level"):
        rewards("as_trl_solution", signature="trl")(prompts, texts)
    with pytest.raises(CodeError, match="returned None: return a number or a Score"):
        rewards("as_trl_none", signature="trl")(prompts, texts)


REFUSED = {
    "rigth": "reward.function: mine.py has no rigth. Did you mean 'right'",
    "calls": "reward.function: mine.py:calls cannot be called with (prompt, text): ",
    "one": "reward.function: mine.py:one cannot be called with (prompt, text): ",
    "as_trl": "has the signature of TRL: write reward: {kind: own, function: mine.py:as_trl, signature: trl}",
    "as_verl": "has the signature of verl: write reward: {kind: own, function: mine.py:as_verl, signature: verl}",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_used_is_refused(rewards, name):
    with pytest.raises(ConfigError) as error:
        rewards(name).check()
    assert REFUSED[name] in str(error.value)


def test_options_without_an_effect_are_refused(rewards):
    with pytest.raises(ConfigError, match=r"reward.at_once: 3, but mine.py:right is no async function"):
        rewards("right", at_once=3).check()
    with pytest.raises(ConfigError, match=r"mine.py:one cannot be called with \(data_source, solution_str"):
        rewards("one", signature="verl").check()


@pytest.mark.parametrize("code", ["import sys; sys.exit('no model')", "raise OSError('no model')"])
def test_a_file_that_cannot_be_loaded(tmp_path, monkeypatch, code):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(code)
    message = r"^reward.function: importing mine.py failed: .*no model \(.*line 1\)"
    with closing(build(OwnOptions(function="mine.py:right"))) as reward, pytest.raises(ConfigError, match=message):
        reward.check()


class Judge(BaseHTTPRequestHandler):
    """Answers every third request by 503, and grades by the digit in the response."""

    lock, asked, open_now, most = Lock(), count(), 0, 0

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with Judge.lock:
            busy = next(Judge.asked) % 3 == 2
            Judge.open_now += 1
            Judge.most = max(Judge.most, Judge.open_now)
        time.sleep(0.1)
        grade = re.search(r"Response: (\d+)", body["messages"][0]["content"])
        said = f"Let me see. Grade: {grade[1]}" if grade else "I cannot say."
        answer = json.dumps({"choices": [{"message": {"content": said}}]}).encode()
        with Judge.lock:
            Judge.open_now -= 1
        self.send_response(503 if busy else 200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


def test_the_documented_judge_retries_and_asks_a_few_at_once(tmp_path, monkeypatch):
    pytest.importorskip("httpx")
    files_of(ROOT / "docs/own_data_and_reward.md", tmp_path)
    monkeypatch.chdir(tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), Judge) as server, ThreadPoolExecutor(1) as thread:
        serving = thread.submit(server.serve_forever, 0.05)
        monkeypatch.setenv("JUDGE_URL", f"http://127.0.0.1:{server.server_port}/v1/chat/completions")
        with closing(build(OwnOptions(function="judge.py:judge", maximum=1.0, at_once=4))) as reward:
            scores = reward([PROMPT] * 6 + [OTHER] * 6, [*map(str, range(11)), "none"])
        server.shutdown()
        serving.result()
    assert [score.reward for score in scores[:-1]] == [i / 10 for i in range(11)]
    assert [score.correct for score in scores[:-1]] == [i >= 8 for i in range(11)]
    assert "ValueError: the judge gave no grade" in scores[-1].error
    assert 2 <= Judge.most <= 4, "calls at once"
    assert next(Judge.asked) >= 18, "twelve responses, of which one is asked about twice, and those that were refused"
