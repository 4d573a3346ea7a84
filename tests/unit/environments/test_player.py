"""Episodes of a real engine with environments in real processes: tokens stay as sampled, faults cost one episode."""

import re
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_rft.environments.player import Episodes
from megatron_rft.environments.process import EnvironmentProcesses, EpisodeEnvironment
from megatron_rft.environments.template import Template
from megatron_rft.inference.engine import EngineLost, Request, Sampling
from megatron_rft.inference.pool import EnginePool
from megatron_rft.records import Prompt, Score
from megatron_rft.rewards.base import Reward
from megatron_rft.utils.errors import CodeError, ConfigError, RunFailed
from tests.made import WholeStep
from tests.unit.inference.tiny import build_engine, build_model
from tests.unit.rollout.test_sampler import strict

SAMPLING = Sampling(24, stop_token_ids=(2, 3, 4, 5, 6, 7))  # turns end soon: the model is random
WORLDS = Path(__file__).with_name("worlds.py")


class Letters:
    """Token 3 is "A", token 4 is "B" ...; there is no chat template."""

    chat_template, added_tokens_decoder = None, {}

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(62 + i) for i in ids if i != 2)

    def __call__(self, texts: list[str], **asked: bool) -> dict[str, list[list[int]]]:
        assert not asked["add_special_tokens"]
        return {"input_ids": [[ord(c) - 62 for c in text] for text in texts]}


@pytest.fixture
def play(engine, tmp_path):
    """A function that makes a player; all processes end with the test."""
    players = []

    def make(kind: str = "Echo", timeout_s: float = 20.0, count: int = 2, engine=engine, **options) -> Episodes:
        own = {"kind": "own", "episode": f"{WORLDS}:{kind}"}
        processes = EnvironmentProcesses(own, count, timeout_s, tmp_path / "environment")
        template = Template(Letters(), SAMPLING.stop_token_ids)
        options = {"name": kind, "max_turns": 3} | options
        players.append(Episodes(engine, processes, template, Letters().decode, **options))
        return players[-1]

    yield make
    for player in players:
        player.close()


def requests(count: int = 4, n: int = 3, **fields) -> list[Request]:
    prompts = [Prompt(10 + i, tuple(range(3, 5 + i % 3)), f"problem {i}", "", fields) for i in range(count)]
    return [Request(i, p.token_ids, n, seed=i, problem=p) for i, p in enumerate(prompts)]


def responses(player, asked, sampling=SAMPLING) -> dict[int, tuple]:
    return {group.id: group.responses for group in player.generate(asked, sampling)}


def test_the_policys_tokens_stay_and_the_environments_are_between_them(play, engine):
    player = play()
    found = responses(player, requests())
    again = responses(play(count=1), requests())
    assert found == again, "neither the number of processes nor timing decides anything"
    several = 0
    for asked in requests():
        for response in found[asked.id]:
            several += len(response.turns) > 1
            assert len(response.turns) <= 3 and len(response.token_ids) <= SAMPLING.max_tokens
            ends = [0]
            for number, (first, end, _) in enumerate(response.turns):
                assert first - ends[-1] == (1 if number else 0), "one letter of the environment between turns"
                turn = response.token_ids[first:end]
                before = response.token_ids[ends[-1] : first]
                if number:
                    heard = Letters().decode(list(response.token_ids[slice(*response.turns[number - 1][:2])]))
                    assert Letters().decode(list(before)) == "CD"[len(heard) % 2] == response.said[number - 1]
                    assert response.logprobs[ends[-1] : first] == (0.0,)
                assert all(token not in SAMPLING.stop_token_ids for token in turn[:-1])
                ends.append(end)
            assert all(logprob < 0 for first, end, _ in response.turns for logprob in response.logprobs[first:end])
    assert several >= 6


def test_a_turn_is_what_the_engine_writes_after_all_tokens_so_far(play, engine):
    greedy = replace(SAMPLING, temperature=0.0)
    for asked in requests(n=1):
        (response,) = responses(play(), [asked], greedy)[asked.id]
        for first, end, _ in response.turns:
            one = Request(0, (*asked.prompt_ids, *response.token_ids[:first]), 1, seed=0, max_tokens=24 - first)
            (turn,) = responses(engine, [one], greedy)[0]
            assert turn.token_ids == response.token_ids[first:end]
            assert turn.logprobs == pytest.approx(response.logprobs[first:end], abs=1e-5)


def test_one_turn_is_no_environment_bit_for_bit(play, engine):
    asked = requests()
    plain = responses(engine, asked)
    for options in ({"max_turns": 1}, {}):
        episodes = responses(play(**options), requests(rounds=1))
        for id, group in plain.items():
            for one, other in zip(group, episodes[id], strict=True):
                assert replace(other, turns=(), said=()) == one
                assert other.turns == ((0, len(one.token_ids), 0.0),) and other.last_turn == one.token_ids


def test_rewards_and_scores(play):
    found = responses(play(), requests(reward=0.25, scores=True, rounds=2))
    for response in (each for group in found.values() for each in group):
        heard = [turn for turn in response.turns if turn[2]]
        assert [reward for *_, reward in heard] == [0.25] * len(heard)
        assert response.score.reward == 0.5 and response.score.correct is None
        total = response.total(response.score)
        assert total.reward == 0.5 + 0.25 * len(heard) and total.correct is (None if not heard else False)


def test_first_messages_follow_the_prompt(play):
    found = responses(play(), requests(count=2, opening="FG"))
    for asked in requests(count=2):
        for response in found[asked.id]:
            assert response.prompt_ids == (*asked.prompt_ids, 8, 9) and response.said[0] == "FG"
            assert len(response.token_ids) + 2 <= SAMPLING.max_tokens


FAULTS = {
    "raises": "LookupError: no such place (worlds.py, line",
    "exits": "SystemExit: 3",
    "late": "gave no answer within 2 s (environment.turn_timeout_s)",
    "dies": "its process was killed by SIGKILL",
    "closes": "its process closed its connection",
    "long": "10000000 characters",
    "interrupts": "KeyboardInterrupt:  (worlds.py, line",
}
FORM = 'a text or a list of {"role": ..., "content": text, or a list of texts and images} is needed'
BROKEN = {
    "bytes": "Turn(text=b'no text', reward=0.0, done=False): " + FORM,
    "none": "Turn(text=None, reward=0.0, done=False): " + FORM,
    "no role": "Turn(text=[{'content': 'A'}], reward=0.0, done=False): " + FORM,
    "parts": "Turn(text=[{'role': 'user', 'content': [{'type': 'audio', 'audio': 'A'}]}], rewa: " + FORM,
    "no JSON": "Turn(text=[{'role': 'user', 'content': 'A', 'seen': {1, 2}}], reward=0.0, done=F: " + FORM,
    "surrogate": r"Turn(text='\ud800 x', reward=0.0, done=False): it has half of a surrogate pair",
    "nan": "Turn(text='A', reward=nan, done=False): its reward must be a finite number",
    "words": "Turn(text='A', reward='1.0', done=False): its reward must be a finite number",
    "no turn": "'A': return a Turn(text, reward=..., done=...)",
    "tuple": "('A', 1.0, True): return a Turn(text, reward=..., done=...)",
}


@pytest.mark.parametrize("fault", BROKEN)
def test_what_can_never_be_used_ends_the_run(play, fault):
    with pytest.raises(CodeError) as error:
        responses(play(count=1), requests(fault=fault, fault_at=1))
    where = r"environment Echo, problem 1\d, turn 1: step \(worlds.py, line \d+\) returned "
    assert re.fullmatch(where + re.escape(BROKEN[fault]) + ".*", str(error.value)), error.value


def test_numbers_of_numpy_are_numbers(play):
    found = responses(play("Numpy"), requests(count=1))
    for response in found[0]:
        heard = not response.said[0].startswith("[")
        assert response.score == Score(0.5) and response.turns[0][2] == float(heard), response
    assert any(response.turns[0][2] for response in found[0])


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_costs_one_episode(play, fault, monkeypatch):
    """The others of its process are played again in a new one, and do not change."""
    answer = EpisodeEnvironment._answer

    def patient(self, call, arguments):
        """Only the call with the fault has the short limit."""
        faulty = call == "step" and len(self.calls) == 2 and self.calls[0][1]["prompt"]["fields"]
        with monkeypatch.context() as patched:
            if not faulty or arguments is self.calls[1][1]:  # played again
                patched.setattr(self.process, "timeout_s", 20.0)
            return answer(self, call, arguments)

    monkeypatch.setattr(EpisodeEnvironment, "_answer", patient)
    whole = responses(play(), requests())
    asked = requests()
    broken = replace(asked[2].problem, fields={"fault": fault, "fault_at": 2})
    asked[2] = replace(asked[2], problem=broken)
    player = play(timeout_s=2.0 if fault == "late" else 20.0, count=1)
    found = responses(player, asked)
    failed = 0
    for id, group in found.items():
        for one, other in zip(whole[id], group, strict=True):
            if id == 2 and sum(text[0] != "[" for text in one.said) > 1:  # it heard two turns
                failed += 1
                assert other.finish_reason == "abort" and FAULTS[fault] in other.score.error, other.score
                assert other.score.error.startswith("environment Echo, problem 12, turn 2: ")
            else:
                assert replace(other, logprobs=()) == replace(one, logprobs=())
                assert other.logprobs == pytest.approx(one.logprobs, abs=1e-5)  # other neighbours in the batch
    assert failed


def test_an_environment_that_answers_otherwise_when_it_is_played_again_is_named(play, tmp_path):
    asked = requests(count=3, died=str(tmp_path / "died"))
    broken = replace(asked[0].problem, fields=asked[0].problem.fields | {"fault": "dies", "fault_at": 2})
    found = responses(play("Replaced", count=1, max_turns=4), [replace(asked[0], problem=broken), *asked[1:]])
    errors = {each.score.error for group in found.values() for each in group if each.score}
    assert any("otherwise when the episode was played again" in error for error in errors)


def test_the_global_generator_does_not_depend_on_the_order_of_episodes(play):
    assert responses(play("Random", count=3), requests()) == responses(play("Random", count=1), requests())


def test_an_episode_that_reaches_its_limit_ends_as_length(play):
    short = replace(SAMPLING, max_tokens=5)
    found = [each for group in responses(play(max_turns=9), requests(), short).values() for each in group]
    cut = [each for each in found if each.finish_reason == "length"]
    assert cut and all(
        len(each.token_ids) <= 5 and "ended" in each.said[-1] or "cut off" in each.said[-1] for each in cut
    )
    found = responses(play(turn_tokens=2), requests())
    assert all(end - first <= 2 for group in found.values() for each in group for first, end, _ in each.turns)


@pytest.mark.parametrize("fault, message", [("raises", "LookupError"), ("dies", "SIGKILL"), ("exits", "SystemExit")])
def test_a_fault_at_the_score_drops_the_episode(play, fault, message):
    found = responses(play(), requests(count=1, fault=fault, fault_at="score", rounds=1))
    for response in found[0]:
        assert response.finish_reason == "abort" and message in response.score.error


STARTS = {"raise OSError('no')": "importing .* failed: OSError: no", "import os; os._exit(3)": "ended with status 3"}
STARTS["import time; time.sleep(60)"] = "gave no answer within 1 s .when its process started"


def test_a_class_that_is_not_there(play):
    with pytest.raises(ConfigError, match=r"environment.episode: .* has no Ecko"):
        responses(play("Ecko"), requests())


@pytest.mark.parametrize("code", STARTS)
def test_a_file_that_cannot_be_loaded_is_no_fault_of_an_episode(tmp_path, monkeypatch, code):
    (tmp_path / "broken.py").write_text(code)
    monkeypatch.setattr("megatron_rft.utils.worker_process.START_TIMEOUT_S", 1.0 if "sleep" in code else 60.0)
    options = {"kind": "own", "episode": f"{tmp_path}/broken.py:Echo"}
    processes = EnvironmentProcesses(options, 1, 20.0, tmp_path / "log")
    with pytest.raises(ConfigError, match=rf"environment(.episode)?: .*{STARTS[code]}"):
        processes.new().ask("reset", prompt={}, seed=0)
    processes.close()


class Flaky:
    """An engine for several threads that is lost in its second call, when it has given an answer."""

    name = "engine 0"

    def __init__(self, engine, lost: int = 2):
        self.engine, self.lost, self.calls, self.starts = engine, lost, 0, 0
        self.lock, self.prompts = threading.Lock(), set()

    def agree(self, flag):
        return flag

    def generate(self, requests, sampling):
        with self.lock:
            self.calls += 1
            self.prompts |= {request.prompt_ids[0] for request in requests}
            for group in self.engine.generate(requests, sampling):
                yield group
                if self.calls == self.lost:
                    self.lost = 0
                    raise EngineLost("engine 0 was killed")

    def start(self) -> None:
        self.starts += 1


def pool(engine, *lost: int) -> EnginePool:
    found = EnginePool([Flaky(engine, each) for each in lost], torch.float32)
    found.reload = lambda: None
    return found


def test_episodes_of_a_lost_engine_go_on_after_their_last_turn(play, engine):
    whole, engines = responses(play(), requests()), pool(engine, 2)
    player = play(engine=engines)
    assert same_tokens(responses(player, requests()), whole)
    assert engines.members[0].starts == 1 and engines.restarts == 1 and not player.stuck


def same_tokens(one: dict[int, tuple], other: dict[int, tuple]) -> bool:
    """With log-probs that differ by rounding: other neighbours in the batch."""
    for id, group in one.items():
        for left, right in zip(group, other[id], strict=True):
            assert replace(left, logprobs=()) == replace(right, logprobs=())
            assert left.logprobs == pytest.approx(right.logprobs, abs=1e-5)
    return one.keys() == other.keys()


def test_all_turns_of_an_episode_are_of_one_engine(play, engine):
    """Two engines in threads: the same episodes, and each engine's cache has the earlier turns."""
    prompts = [(3 + i, 3, 3) for i in range(5)]
    asked = [replace(each, prompt_ids=ids) for each, ids in zip(requests(count=5), prompts, strict=True)]
    engines = pool(engine, 0, 0)
    engines.members[1].engine = build_engine(build_model())
    assert same_tokens(responses(play(engine=engines), asked), responses(play(), asked))
    assert [member.prompts for member in engines.members] == [{3, 5, 7}, {4, 6}]


def test_each_episode_at_its_own_pace(play, engine):
    """However many play at once, and if the engine is lost. Scores and rewards are as in waves."""
    asked = requests(reward=0.25, scores=True, rounds=2)
    alone = responses(play(engine=pool(engine, 0), at_once=1), asked)
    assert same_tokens(responses(play(engine=pool(engine, 0), at_once=8), asked), alone)
    engines = pool(engine, 5)
    assert same_tokens(responses(play(engine=engines, at_once=4), asked), alone) and engines.restarts == 1
    turns = {len(response.turns) for group in alone.values() for response in group}
    assert turns == {1, 2} and all(each.score.reward == 0.5 for group in alone.values() for each in group)


class Half(Reward):
    maximum = 1.0

    def __call__(self, prompts, texts):
        self.texts = texts
        return [Score(float("A" in text)) for text in texts]


def sampler(player, reward, **named) -> WholeStep:
    return WholeStep(player, SAMPLING, reward, Letters(), group_size=3, seed=1, **named)


def drawn(**fields):
    return lambda count: [replace(each.problem, fields=fields) for each in requests(count)]


def test_a_batch_of_episodes(play):
    reward = Half()
    sampled = sampler(play(), reward).sample(drawn(reward=0.25), 4, step=0)
    batch = sampled.batch
    written = sum(len(each.response.turns) and each.response.length for each in sampled.rollouts)
    assert batch.response_mask.sum() == written < len(batch.response_ids)
    assert sampled.metrics["tokens/generated"] == written
    assert sampled.metrics["environment/turns_max"] == 3
    turns = torch.zeros(len(batch)).index_add_(0, batch.sequence_ids, batch.tokens["turn_rewards"])
    ends = (batch.tokens["turn_rewards"] > 0) & (batch.response_mask == 0)
    assert not ends.any() and (turns > 0).any()
    own = torch.tensor([each.score.reward for each in sampled.rollouts])
    assert torch.equal(batch.sequences["rewards"], own)
    judged = [Letters().decode(list(each.response.last_turn)) for each in sampled.rollouts]
    verdicts = torch.tensor([float("A" in text) for text in judged])
    assert torch.equal(batch.sequences["rewards"] - turns, verdicts), "the verifier sees the last turn alone"
    assert all(each.response.score is None for each in sampled.rollouts)


def test_failed_environments_drop_a_response_or_stop_the_run(play):
    faulty, lenient = drawn(fault="raises", fault_at=2), Half()
    lenient.max_error_share = 1.0
    sampled = sampler(play(), lenient).sample(faulty, 4, step=0)
    errors = sampled.metrics["reward/grader_errors"]
    assert 0 < errors < 12 and len(sampled.batch) == 12 - errors
    assert sampled.metrics["environment/errors"] == errors
    assert all(len(each.response.turns) > 1 for each in sampled.rollouts if each.score.error)
    with pytest.raises(RunFailed, match="environment Echo, problem 1., turn 2: LookupError"):
        sampler(play(), strict(Half())).sample(faulty, 4, step=0)
    with pytest.raises(RunFailed, match=rf"failed on {errors:.0f} of 12 responses \(reward.max_error_share=0.5\)"):
        sampler(play(), Half()).sample(faulty, 4, step=0)


def test_an_environment_that_fails_before_the_first_turn(play, engine):
    """It has no turn and no version. If all fail, the run ends with the reason."""
    some = [replace(each.problem, fields={"fault": "raises", "fault_at": -i}) for i, each in enumerate(requests())]
    sampled = sampler(play(), Half()).sample(lambda count: some, 4, step=3)
    assert sampled.metrics["environment/errors"] == 3 and len(sampled.batch) == 9
    assert sampled.batch.scalars["oldest_version"] == engine.weight_version
    for opening in (None, "FG"):
        every = drawn(fault="raises", fault_at=0, opening=opening)
        with pytest.raises(RunFailed, match="environment Echo, problem 10, turn 0: LookupError: no such place"):
            sampler(play(), Half()).sample(every, 4, step=0)
