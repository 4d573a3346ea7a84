"""Programs in real processes, which ask a real endpoint of a real engine: tokens stay as sampled, each is in one turn
of one segment, and nothing of a program stays."""

import contextlib
import dataclasses
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from megatron_rft.config.environment import Program
from megatron_rft.environments.process import EnvironmentProcesses
from megatron_rft.environments.template import Template
from megatron_rft.environments.tools import schemas
from megatron_rft.environments.worker import maker
from megatron_rft.inference.engine import EngineLost, Request, Sampling
from megatron_rft.records import Prompt
from megatron_rft.utils import end_with_parent
from megatron_rft.utils.errors import ConfigError
from tests.unit.environments.test_template import CHATML
from tests.unit.inference.tiny import CONFIGS, build_engine, build_model
from tools.bench.programs import byte_tokenizer

pytest.importorskip("aiohttp")
from megatron_rft.environments import dialects, endpoint  # noqa: E402
from megatron_rft.environments.program import KEPT, ProgramEpisode  # noqa: E402
from megatron_rft.environments.programs import Programs  # noqa: E402
from megatron_rft.environments.script import scripted  # noqa: E402

HERE = Path(__file__).parent
AGENT, GRADERS = HERE / "agent.py", HERE / "graders.py"
EXPECTED = {"HOME", "TMPDIR", "MEGATRON_RFT_ROW", "MEGATRON_RFT_MODEL", "MEGATRON_RFT_SEED", "PYTHONHASHSEED", "PWD"}
EXPECTED |= {f"{api}_{what}" for api in ("OPENAI", "ANTHROPIC") for what in ("BASE_URL", "API_KEY")} | {
    "OPENAI_API_BASE"
}
EVENTS = {f"{part}.{what}" for part in ("content_part", "output_item") for what in ("added", "done")} | {
    f"{part}.{what}"
    for part in ("function_call_arguments", "output_text", "reasoning_text")
    for what in ("delta", "done")
}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 41}}</tool_call>'


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer(CHATML)


@pytest.fixture(scope="module")
def chat_model():
    config = type(CONFIGS["qwen3"])(**CONFIGS["qwen3"].to_dict() | {"vocab_size": 258, "max_position_embeddings": 4096})
    return build_model(config)


@pytest.fixture
def chat_engine(chat_model):
    return build_engine(chat_model)


def sampling(tokenizer, longest: int = 1500) -> Sampling:
    return Sampling(longest, stop_token_ids=stops(tokenizer))


def stops(tokenizer) -> tuple[int, ...]:
    """Turns end soon: the model is random."""
    return (tokenizer.eos_token_id, *range(0, 256, 16))


def program(name: str, **options) -> Program:
    options = {"max_turns": 20, "turn_tokens": 12} | options
    return Program(kind="program", command=[sys.executable, str(AGENT), name], **options)


@pytest.fixture
def play(tokenizer, tmp_path):
    """A function that makes a player; all processes end with the test."""
    players = []

    def make(name: str, engine, at_once=None, **options) -> Programs:
        given = program(name, **options)
        processes = EnvironmentProcesses(given.own_options(), 2, given.episode_timeout_s, tmp_path / "environment")
        template = Template(tokenizer, stops(tokenizer))
        parts = (engine, processes, template, str, given.name, given.max_turns, given.turn_tokens)
        players.append(Programs(*parts, at_once=at_once, options=given))
        return players[-1]

    yield make
    for player in players:
        player.close()


def requests(tokenizer, count: int = 2, n: int = 2) -> list[Request]:
    found = []
    for index in range(count):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": f"problem {index}"}], tokenize=False, add_generation_prompt=True
        )
        ids = tuple(tokenizer.encode(text, add_special_tokens=False))
        problem = Prompt(index, ids, text, "7", {"level": index}, f"problem {index}")
        found.append(Request(index, ids, n, seed=index, problem=problem))
    return found


def responses(player, asked, how) -> dict[int, tuple]:
    return {group.id: group.responses for group in player.generate(asked, how)}


def tokens(found: dict[int, tuple]) -> dict[int, list]:
    """Without log-probs, and without the order of turns: on a busy machine that of sub-agents depends on time."""
    named = ("prompt_ids", "token_ids", "turns", "finish_reason")
    return {
        id: [sorted([getattr(part, name) for name in named] for part in parts(each)) for each in group]
        for id, group in found.items()
    }


def parts(response) -> list:
    return [*response.segments, response]


def turns_of(response) -> list:
    return [turn for part in parts(response) for turn in part.turns]


def only(player, tokenizer, n: int = 1, longest: int = 1500):
    """The responses to one request."""
    return responses(player, requests(tokenizer, 1, n), sampling(tokenizer, longest))[0]


def test_recorded_tokens_are_what_the_engine_sampled(play, chat_engine, chat_model, tokenizer):
    player = play("agent", chat_engine)
    asked, how = requests(tokenizer), sampling(tokenizer)
    sampled: list[tuple] = []
    generate = chat_engine.generate

    def recorded(wave, given):
        for group in generate(wave, given):
            sampled.extend((tuple(each.token_ids), each.logprobs) for each in group.responses)
            yield group

    chat_engine.generate = recorded
    found = responses(player, asked, how)
    played = [each for group in found.values() for each in group]
    turns = []
    for response in played:
        assert response.finish_reason != "abort" and len(turns_of(response)) == 12, response.score
        assert len(response.segments) == 6, "the loop, two sub-agents, three answers and the summary"
        for part in parts(response):
            prompt = part.prompt_ids
            ids = torch.tensor([*prompt, *part.token_ids])
            logprobs = chat_model(ids[None]).logits[0].log_softmax(-1)
            for first, end, _ in part.turns:
                turns.append((tuple(part.token_ids[first:end]), tuple(part.logprobs[first:end])))
                for place in range(first, end):
                    exact = logprobs[len(prompt) + place - 1, part.token_ids[place]]
                    assert abs(exact - part.logprobs[place]) < 1e-4
        assert sum(id >= 256 for id in response.segments[0].prompt_ids) == 5, "the prompt's own control tokens"
    assert sorted(turns) == sorted(sampled), "each sampled token is in one turn of one segment"
    orders = [sorted(number for part in parts(each) for number in part.order) for each in played]
    assert all(order == list(range(12)) for order in orders)


def test_neither_time_nor_the_number_at_once_decides(play, chat_engine, tokenizer):
    asked, how = requests(tokenizer), sampling(tokenizer)
    waves = responses(play("agent", chat_engine), asked, how)
    few = responses(play("agent", chat_engine, programs=2), asked, how)
    assert tokens(few) == tokens(waves), "log-probs differ by the rounding of a batch"
    alone = responses(play("agent", chat_engine, at_once=1), asked, how)
    for group, other in zip(waves.values(), alone.values(), strict=True):
        for one, two in zip(group, other, strict=True):  # a group's first turn is one request, in waves alone
            assert [len(part.turns) for part in parts(one)] == [len(part.turns) for part in parts(two)]
            agents = [sorted(tokens({0: each.segments[1:3]})[0]) for each in (one, two)]
            assert agents[0] == agents[1], "the sub-agents"


def test_requests_that_wait_to_be_read_are_of_the_same_wave(play, chat_engine, tokenizer, monkeypatch):
    """As on a busy machine, where the endpoint's thread waits for a core after each request."""
    monkeypatch.setattr("megatron_rft.environments.program.LONGEST_SETTLE_S", 300.0)
    asked, how = requests(tokenizer), sampling(tokenizer)
    waves = responses(play("agent", chat_engine), asked, how)
    ask = ProgramEpisode.ask

    def slow(*given):
        asks = ask(*given)
        asks[0].episode.world.endpoint.loop.call_soon(time.sleep, 0.1)
        return asks

    monkeypatch.setattr(ProgramEpisode, "ask", slow)
    found = responses(play("agent", chat_engine), asked, how)

    def orders(played):
        return [part.order for group in played.values() for each in group for part in parts(each)]

    assert tokens(found) == tokens(waves) and orders(found) == orders(waves)


@pytest.mark.parametrize(
    "looks",
    [
        [*[(None, 9.0)] * 500, (None, 9.7), (None, 10.1)],
        [(str(number), 9.0) for number in range(101)],
        [("1", 9.0), ("2", 9.0), ("2", 9.0)],
    ],
    ids=["computes", "wakes again and again", "sleeps"],
)
def test_a_wave_waits_for_a_program_that_gets_no_core(monkeypatch, looks):
    """It waits for a second of the program's own computing, however long that takes, and for a hundred looks at most
    at one that sleeps and wakes."""
    world = SimpleNamespace(options=program("once"))
    episode, seen = ProgramEpisode(world, None, 0, 0, None), iter(looks)
    episode.process = SimpleNamespace(pid=0)
    monkeypatch.setattr("megatron_rft.environments.program.activity", lambda _pid: next(seen))
    assert [episode._runs(float(now)) for now in range(len(looks))] == [True] * (len(looks) - 1) + [False]


def test_a_lost_engine_costs_nothing(play, chat_engine, tokenizer):
    asked, how = requests(tokenizer, 2, 1), sampling(tokenizer)
    whole = responses(play("agent", chat_engine), asked, how)
    player, generate, calls = play("agent", chat_engine), chat_engine.generate, []

    def lost(wave, given):
        calls.append(len(wave))
        if len(calls) == 3:
            raise EngineLost("gone")
        return generate(wave, given)

    chat_engine.generate = lost
    found: dict[int, tuple] = {}
    with pytest.raises(EngineLost):
        found |= responses(player, asked, how)
    assert tokens(found | responses(player, asked, how)) == tokens(whole) and not player.stuck


def test_the_score_sees_how_the_program_ended(play, chat_engine, tokenizer):
    (response,) = only(play("agent", chat_engine, score=f"{GRADERS}:files"), tokenizer)
    about = json.loads(response.score.reason)
    assert about["files"] == {"result.txt": "done"} and about["status"] == 0 and response.score.reward == 0.5
    assert about["last"]["role"] == "assistant"
    (failed,) = only(play("fails", chat_engine, score=f"{GRADERS}:files"), tokenizer)
    assert json.loads(failed.score.reason)["status"] == 1, "the function judges a failure, too"
    (plain,) = only(play("once", chat_engine), tokenizer)
    assert plain.score is None, "the recipe's reward judges the last turn"


def test_the_score_sees_the_turn_that_was_sampled_last(play, chat_engine, tokenizer, monkeypatch):
    """Answers come in any order: here that to the last turn is the first."""
    give, late = ProgramEpisode.give, []

    def given(self, ask, turn):
        if ask.number < 3:
            late.append((ask, turn))
        else:
            give(self, ask, turn)
            while len(late) < 3:  # threads give them
                time.sleep(0.01)
            for each in late:
                give(self, *each)

    monkeypatch.setattr(ProgramEpisode, "give", given)
    (response,) = only(play("several", chat_engine, score=f"{GRADERS}:files"), tokenizer)
    last = json.loads(response.score.reason)["last"]["content"]
    first, end, _ = response.turns[-1]
    ids = [id for id in response.token_ids[first:end] if id not in stops(tokenizer)]
    assert len(turns_of(response)) == 4 and tokenizer.decode(ids).removesuffix("<|im_end|>") == last


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("fails", {}, r"turn 1: ended with status 1: .*some output.*ValueError: a bug of the program"),
        ("floods", {}, r"turn 1: ended with status 1: \x00*the end$"),
        ("silent", {}, r"turn 0: ended with status 0 before the policy had a turn: it printed nothing"),
        ("hangs", {"episode_timeout_s": 2.0}, r"turn 1: took longer than 2 s .episode_timeout_s"),
        ("once", {"episode_timeout_s": 3.0, "score": f"{GRADERS}:slow"}, r"turn 1: gave no answer within [0-2]"),
    ],
)
def test_a_fault_costs_one_episode(play, chat_engine, tokenizer, monkeypatch, name, options, message):
    """The starts of two Pythons may take longer than a limit: it has 600 s more until the moment under test."""
    start, give, finish = ProgramEpisode.start, ProgramEpisode.give, ProgramEpisode._finish

    def started(self):
        self.left += 600.0
        start(self)

    def given(self, *turn):
        give(self, *turn)
        if name == "hangs":
            self.left -= 600.0

    def finished(self, status):
        self.left -= 600.0
        finish(self, status)

    monkeypatch.setattr(ProgramEpisode, "start", started)
    monkeypatch.setattr(ProgramEpisode, "give", given)
    monkeypatch.setattr(ProgramEpisode, "_finish", finished)
    (response,) = only(play(name, chat_engine, **options), tokenizer)
    assert response.finish_reason == "abort" and response.score.reward == 0.0
    assert re.search(r"(?s)program .*agent.py.*problem 0, " + message, response.score.error), response.score.error


def test_a_program_that_does_not_start(chat_engine, tokenizer, play):
    (response,) = only(play("once", chat_engine, host="127.0.0.1"), tokenizer)
    assert response.score is None
    with pytest.raises(ConfigError, match="environment.command: there is no program nowhere"):
        schemas(Program(kind="program", command=["nowhere"]))
    with pytest.raises(ConfigError, match=r"graders.py:three must be a function .row, folder, status, conversation."):
        maker(**program("once", score=f"{GRADERS}:three").own_options())


def below(folder: str) -> list[psutil.Process]:
    """Processes that work in a folder of programs."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.cwd().startswith(folder):
                found.append(process)
    return found


def test_nothing_of_a_program_stays(play, chat_engine, tokenizer):
    player = play("leaves", chat_engine, score=f"{GRADERS}:grows")
    found = only(player, tokenizer, 3)
    assert [response.score.reward for response in found] == [1.0] * 3, "nothing wrote while it was graded"
    assert not below(str(player.folder)) and not any(player.folder.iterdir()) and not player.world.endpoint.episodes

    def others() -> int:
        """The pool may get a thread again, if those that it has are busy."""
        return sum(not each.name.startswith("program") for each in threading.enumerate())

    threads, folder = others(), player.folder
    only(player, tokenizer, 3)
    assert others() <= threads
    player.close()
    left = [each.name for each in threading.enumerate() if each.name.startswith(("endpoint", "program"))]
    assert not folder.exists() and not left


def test_a_program_may_tell_where_it_works(play, chat_engine, tokenizer):
    """Its folder is the same in each start of a run."""
    player = play("tells", chat_engine)
    found = only(player, tokenizer, 3)
    player.close()
    again = play("tells", chat_engine)
    assert only(again, tokenizer, 3) == found and len({each.prompt_ids for each in found}) == 3
    at_once = play("tells", chat_engine)
    assert again.folder == player.folder != at_once.folder, "while a run has it, another one does not"
    assert len(f"{again.folder}/{2**63:x}/tmp/") < 70 and again.folder.stat().st_mode & 0o777 == 0o700


def test_folders_that_are_read_only_are_removed():
    """As Go's module cache. Root may write there, other users may not."""
    user = os.getuid() or 65534
    script = "import os, shutil, sys; sys.path.insert(0, sys.argv[1]); from end_with_parent import remove_folder; "
    script += "os.setuid(int(sys.argv[2])); remove_folder(sys.argv[3])"
    with tempfile.TemporaryDirectory() as name:
        root, episode = Path(name), Path(name, "episode")
        (episode / "cache/module").mkdir(parents=True)
        (episode / "cache/module/go.mod").touch()
        (root / "other").mkdir()
        (root / "other").chmod(0o555)
        (episode / "link").symlink_to(root / "other")
        for path in (root, *root.rglob("*")):
            os.chown(path, user, -1, follow_symlinks=False)
        for path in (episode / "cache/module", episode / "cache", episode):
            path.chmod(0o555)
        helpers = str(Path(end_with_parent.__file__).parent)
        subprocess.run([sys.executable, "-c", script, helpers, str(user), str(episode)], check=True)
        assert not episode.exists() and (root / "other").stat().st_mode & 0o777 == 0o555


def test_what_cannot_be_removed_is_in_nobodys_way(play, chat_engine, tokenizer, monkeypatch):
    player = play("tells", chat_engine)
    with monkeypatch.context() as patched:
        patched.setattr("megatron_rft.environments.program.remove_folder", lambda folder: None)
        (first,) = only(player, tokenizer)
    (second,) = only(player, tokenizer)
    assert first.finish_reason != "abort" != second.finish_reason and first != second


KILLED = """
import sys, time
from pathlib import Path
from megatron_rft.utils.processes import start_helper
folder = Path(sys.argv[1])
command = ["sh", "-c", "setsid nohup sh -c 'while true; do date >> late.txt; sleep 0.05; done' & sleep 600"]
for number in range(int(sys.argv[2])):
    (folder / f"{number}/work").mkdir(parents=True)
    start_helper(command, reap=True, remove=folder, cwd=folder / f"{number}/work")
print("started", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("count", [3, pytest.param(100, marks=pytest.mark.slow)])
def test_nothing_stays_of_a_killed_trainer(tmp_path, count):
    folder = tmp_path / "programs"
    trainer = subprocess.Popen([sys.executable, "-c", KILLED, str(folder), str(count)], stdout=subprocess.PIPE)
    assert trainer.stdout.readline()
    while not all((folder / f"{number}/work/late.txt").exists() for number in range(count)):
        time.sleep(0.02)
    trainer.kill()
    trainer.wait()
    deadline = time.monotonic() + 60
    while (folder.exists() or below(str(folder))) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not folder.exists() and not below(str(folder))


def test_a_killed_trainer_leaves_the_folder_of_the_next_one(tmp_path):
    folder, old = tmp_path / "programs", tmp_path / "old"
    trainer = subprocess.Popen([sys.executable, "-c", KILLED, str(folder), "1"], stdout=subprocess.PIPE)
    assert trainer.stdout.readline()
    while not (folder / "0/work/late.txt").exists():
        time.sleep(0.02)
    folder.rename(old)
    (folder / "new").mkdir(parents=True)
    trainer.kill()
    trainer.wait()
    while below(str(old)):
        time.sleep(0.05)
    assert (folder / "new").exists()


def test_a_program_finds_its_row_and_none_of_the_runs_secrets(play, chat_engine, tokenizer, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    player = play("looks", chat_engine, score=f"{GRADERS}:files")
    first, second = (json.loads(each.score.reason)["files"]["seen.json"] for each in only(player, tokenizer, 2))
    first, second = json.loads(first), json.loads(second)
    assert first["row"] == {"level": 0, "index": 0, "question": "problem 0", "answer": "7"}
    for seen, other in ((first, second), (second, first)):
        found, root = seen["environment"], str(player.folder)
        assert all(found[name].startswith(root) for name in ("HOME", "TMPDIR", "MEGATRON_RFT_ROW"))
        assert seen["folder"].startswith(root) and found["HOME"] != other["environment"]["HOME"]
        assert found["OPENAI_BASE_URL"].startswith("http://127.0.0.1:") and found["ANTHROPIC_BASE_URL"]
        assert found["OPENAI_API_KEY"] == found["ANTHROPIC_API_KEY"] != other["environment"]["OPENAI_API_KEY"]
        assert "WANDB_API_KEY" not in found and {*found} <= EXPECTED | {*KEPT}


def test_the_endpoint_listens_at_an_address_of_this_machine():
    with pytest.raises(ConfigError, match=r"environment.host: '192.0.2.1' is no address of this machine \(.*assign"):
        endpoint.Endpoint("192.0.2.1")


def test_what_is_refused(play, chat_engine, tokenizer, capsys):
    player = play("refused", chat_engine, score=f"{GRADERS}:files", max_turns=8, max_segments=3)
    (response,) = only(player, tokenizer, longest=1000)
    found = json.loads(json.loads(response.score.reason)["files"]["refused.json"])
    codes = {name: told if isinstance(told, str) else told[:2] for name, told in found.items()}
    assert codes == {
        "key": [401, "invalid_api_key"],
        "bias": [400, "unsupported"],
        "json": [400, "unsupported"],
        "continued": [400, "unsupported"],
        **dict.fromkeys(("form", "form before"), [400, "invalid_request_error"]),
        "image": [400, "unsupported"],
        "picture": [400, "invalid_request_error"],
        "no messages": [400, "unsupported"],
        "no object": [400, "unsupported"],
        "role": "answered",
        "long": [400, "context_length_exceeded"],
        "large": [413, "invalid_request"],
        "path": [404, "invalid_request"],
        "fine": "answered",
        "turns": [400, "max_turns"],
        "segments": [400, "max_segments"],
    }
    assert "maximum context length is" in found["long"][2] and "is a data URL" in found["image"][2]
    assert "a message has an image: set data.image_field" in found["picture"][2]
    log = capsys.readouterr().out
    assert log.count("temperature=0.0; the recipe's sampling counts") == 1
    told = re.findall("a program's request was refused: (.{30})", log)
    assert len({*told}) == len(told) and len(told) >= 10, told
    assert {"response_format is not support", "This model's maximum context l"} <= {*told}


def test_values_that_cannot_be_used_are_refused_and_end_nothing_else(play, chat_engine, tokenizer, caplog, capsys):
    (response,) = only(play("unusable", chat_engine, score=f"{GRADERS}:files"), tokenizer)
    found = json.loads(json.loads(response.score.reason)["files"]["unusable.json"])
    assert len(found) > 30 and len(turns_of(response)) == 1, response.score
    for path, name, status, form, kind, message in found:
        assert (status, kind) == (400, "invalid_request_error") and name in message, (path, name, message)
        assert form == ("error" if path == "/messages" else None)
    assert "encoding: gzip" in str(found) and "Traceback" not in caplog.text + capsys.readouterr().err


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_in_an_answer_is_told_to_its_client_alone(play, chat_engine, tokenizer, monkeypatch, stream, capsys):
    name = "events" if stream else "whole"
    broken = dataclasses.replace(dialects.CHAT, **{name: lambda whole, body: whole["a bug"]})
    monkeypatch.setitem(dialects.DIALECTS, "/v1/chat/completions", broken)
    (response,) = only(play("waits" if stream else "once", chat_engine, score=f"{GRADERS}:files"), tokenizer)
    about = json.loads(response.score.reason)
    if stream:
        assert re.search("event: error\ndata: .*the request failed: KeyError: 'a bug'", about["files"]["lines.txt"])
    assert about["status"] == (0 if stream else 1) and len(turns_of(response)) == 1
    assert "KeyError: 'a bug'" in capsys.readouterr().err


def test_a_stream_is_kept_alive_while_the_policy_takes_its_time(play, chat_engine, tokenizer, monkeypatch):
    monkeypatch.setattr(endpoint, "KEEP_ALIVE_S", 0.1)
    generate, write, written = chat_engine.generate, endpoint.web.StreamResponse.write, threading.Semaphore(0)

    async def counted(self, data):
        await write(self, data)
        written.release()

    def slow(wave, given):
        assert all(written.acquire(timeout=300) for _ in range(3))
        yield from generate(wave, given)

    monkeypatch.setattr(endpoint.web.StreamResponse, "write", counted)
    chat_engine.generate = slow
    (response,) = only(play("waits", chat_engine, score=f"{GRADERS}:files"), tokenizer)
    lines = json.loads(response.score.reason)["files"]["lines.txt"].split("\n\n")
    alive = [line == ": keep-alive" for line in lines]
    assert 3 <= sum(alive) == alive.index(False) and lines[-2] == "data: [DONE]", lines


def patient(episode) -> int:
    """How many clients wait for a turn that another has left."""
    open = [reply for replies in list(episode.jobs.values()) for reply in replies if not reply.task.done()]
    return sum(len(reply.waiting) - 1 for reply in open)


def test_each_of_several_equal_requests_has_a_retry_of_its_own(play, chat_engine, tokenizer):
    player = play("retries_of_several", chat_engine, score=f"{GRADERS}:files")
    generate, waves = chat_engine.generate, []

    def slow(wave, given):
        waves.append(len(wave))
        (episode,) = player.world.endpoint.episodes.values()
        while len(waves) == 1 and sum(map(len, list(episode.jobs.values()))) < 4:
            time.sleep(0.01)
        (episode.folder / "work/asked").write_text("yes")
        while len(waves) == 1 and not episode.exited and patient(episode) < 3:
            time.sleep(0.01)
        yield from generate(wave, given)

    chat_engine.generate = slow
    (response,) = only(player, tokenizer)
    ids, named = json.loads(json.loads(response.score.reason)["files"]["ids.json"])
    assert len({*ids}) == 4 and len({*named}) == 1 and len(turns_of(response)) == 5


def test_a_retry_does_not_sample_again(play, chat_engine, tokenizer):
    player, generate, calls = play("retries", chat_engine), chat_engine.generate, []

    def slow(wave, given):
        calls.append(len(wave))
        (episode,) = player.world.endpoint.episodes.values()
        (episode.folder / "work" / f"asked_{len(calls)}").write_text("yes")

        def retried() -> bool:
            return patient(episode) > 0

        while len(calls) < 3 and not (episode.exited or retried()):
            time.sleep(0.01)
        yield from generate(wave, given)

    chat_engine.generate = slow
    (response,) = only(player, tokenizer)
    assert calls == [1, 1, 1] and len(turns_of(response)) == 3, response.score


def test_no_request_is_held_until_its_episode_ends(play, chat_engine, tokenizer, monkeypatch):
    end, held = ProgramEpisode._end, []

    def ended(self):
        gc.collect()
        held.append([each for each in gc.get_objects() if isinstance(each, endpoint.web.Request)])
        end(self)

    monkeypatch.setattr(ProgramEpisode, "_end", ended)
    (response,) = only(play("agent", chat_engine), tokenizer)
    assert len(turns_of(response)) == 12 and [len(each) <= 1 for each in held] == [True]


def test_openais_client(play, chat_engine, tokenizer):
    pytest.importorskip("openai")
    (response,) = only(play("openai_client", chat_engine), tokenizer)
    assert response.score is None and len(response.turns) == 4 and not response.segments, response.score


def said(options, template, problem, texts, longest=2000):
    """The episode in which the policy says these texts."""
    with tempfile.TemporaryDirectory() as folder:
        processes = EnvironmentProcesses(options.own_options(), 1, options.episode_timeout_s, Path(folder, "never"))
        named = (options.name, options.max_turns, options.turn_tokens)
        player = Programs(None, processes, template, str, *named, options=options)
        with contextlib.closing(player):
            return scripted(player, [(problem, texts)], longest)


def test_calls_of_tools(play, tokenizer):
    pytest.importorskip("openai")
    problem = requests(tokenizer)[0].problem
    options = program("calls_tools", score=f"{GRADERS}:files", turn_tokens=None)
    texts = [CALL, "<think>\nhm\n</think>\n\nSo: " + CALL, "The rest"]
    template = Template(tokenizer, (tokenizer.eos_token_id,))
    (response,) = said(options, template, problem, texts)
    assert json.loads(response.score.reason)["files"] == {"said.txt": "The re|stop"}, response.score
    assert len(response.turns) == 3 and not response.segments
    first, end, _ = response.turns[2]
    assert tokenizer.decode(response.token_ids[first:end]) == "The rest", "trained up to where the text was complete"


def test_anthropics_route(tokenizer):
    problem = requests(tokenizer)[0].problem
    options = program("anthropic_route", score=f"{GRADERS}:files", turn_tokens=None)
    texts = ["<think>\nhm\n</think>\n\nSo: " + CALL, "It is 42.", "Better: something"]
    template = Template(tokenizer, (tokenizer.eos_token_id,))
    (response,) = said(options, template, problem, texts)
    assert json.loads(json.loads(response.score.reason)["files"]["found.json"]) == [
        ["thinking", "So:", "add", {"a": 41}, "tool_use"],
        ["It is 42.", True],
        ['"stop_sequence"', '"et"'],
        ["null", "null", '"stop_sequence"', '"et"'],
        [400, "invalid_request_error"],
    ], response.score
    assert len(turns_of(response)) == 4 and len(response.segments) == 1, "the last turn is asked for again"
    whole = tokenizer.decode([*response.prompt_ids, *response.token_ids])
    assert whole.count("10 tokens left") == 1 and whole.index("10 tokens left") < whole.index("So: ")
    assert whole.count("You help.") == 1 and whole.index("42") < whole.index("Go on.") < whole.index("5 tokens left")


def test_the_route_of_responses(tokenizer, capsys):
    pytest.importorskip("openai")
    problem = requests(tokenizer)[0].problem
    options = program("responses_route", score=f"{GRADERS}:files", turn_tokens=None)
    texts = ["<think>\nhm\n</think>\n\nSo: " + CALL, "It is 42.", "So it is."]
    template = Template(tokenizer, (tokenizer.eos_token_id,))
    (response,) = said(options, template, problem, texts)
    assert response.score.error is None, response.score
    found = json.loads(json.loads(response.score.reason)["files"]["found.json"])
    assert found[:4] == [
        ["hm", "So:", "sums", "add", '{"a": 41}', "completed"],
        [
            "response.created",
            "response.in_progress",
            "response.completed",
            sorted(f"response.{kind}" for kind in EVENTS),
        ],
        ["It is 42.", True, "completed"],
        ["incomplete", "max_output_tokens", 2],
    ]
    refused = {name: [status, code, message] for name, status, code, message in found[4:]}
    assert refused["image"][:2] == [400, "invalid_messages"] and "set data.image_field" in refused.pop("image")[2]
    assert all(each[:2] == [400, "unsupported"] for each in refused.values()) and len(refused) == 3
    assert "previous_response_id is not supported" in refused["kept"][2]
    assert "type 'custom' is not supported" in refused["tool"][2]
    assert "response_format is not supported" in refused["form"][2]
    assert len(response.turns) == 3 and not response.segments, "one segment"
    assert "web_search=True; this server has none" in capsys.readouterr().out


def test_a_script_of_a_shell(tokenizer):
    """As long as no path of a file can be."""
    script = f"{sys.executable} {AGENT} once && echo done > result.txt  # {'long ' * 1000}"
    options = Program(kind="program", command=["sh", "-c", script], score=f"{GRADERS}:files")
    template, problem = Template(tokenizer, (tokenizer.eos_token_id,)), requests(tokenizer)[0].problem
    (response,) = said(options, template, problem, ["yes"])
    assert json.loads(response.score.reason)["files"] == {"result.txt": "done\n"}


DOCKER = """#!/bin/sh
# In place of docker: it writes what it was told, and runs the command in the working folder that it was given.
printf '%s\\n' "$@" > told.txt
while [ "$1" != image ]; do shift; done
shift
exec "$@"
"""
CONTAINERS = {
    "docker": 'docker run --rm --network=host -v "$E:$E" -w "$PWD" -e OPENAI_BASE_URL -e OPENAI_API_KEY '
    "-e MEGATRON_RFT_ROW -e MEGATRON_RFT_MODEL image",
    "unshare": "unshare --user --map-root-user --mount --pid --fork --kill-child",
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_program_in_a_container(tokenizer, tmp_path, monkeypatch, name):
    """The line of docs/agents.md, with a script in place of docker; and one with namespaces of the kernel."""
    (tmp_path / "docker").write_text(DOCKER)
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    if name == "unshare" and subprocess.run(["sh", "-c", f"{CONTAINERS[name]} true"], capture_output=True).returncode:
        pytest.skip("no namespaces here")
    line = f'E=$(dirname "$MEGATRON_RFT_ROW"); exec {CONTAINERS[name]} {sys.executable} {AGENT} looks'
    options = Program(kind="program", command=["sh", "-c", line], score=f"{GRADERS}:files")
    template, problem = Template(tokenizer, (tokenizer.eos_token_id,)), requests(tokenizer)[0].problem
    (response,) = said(options, template, problem, ["yes"])
    files = json.loads(response.score.reason)["files"]
    seen = json.loads(files["seen.json"])
    assert seen["row"]["question"] == "problem 0" and len(response.turns) == 1
    if name == "docker":
        told, folder = files["told.txt"].splitlines(), str(Path(seen["folder"]).parent)
        assert told[told.index("-v") + 1] == f"{folder}:{folder}" and told[told.index("-w") + 1] == seen["folder"]
        given = {told[place + 1] for place, word in enumerate(told) if word == "-e"}
        assert given <= {*seen["environment"]} and seen["environment"]["MEGATRON_RFT_ROW"].startswith(folder)


@pytest.mark.parametrize(
    ("name", "texts", "segments"),
    [
        (
            "compacting_agent",
            ["<run>yes abc | head -c 3000</run>", "<run>yes d | head -c 3000</run>", "It said abc."],
            2,
        ),
        ("sub_agents", ["I say 7."], 3),
    ],
)
def test_the_examples_of_agents(tokenizer, name, texts, segments):
    """A compacted history and sub-agents are segments of one episode, with one score."""
    pytest.importorskip("openai")
    file = HERE.parents[2] / f"examples/agents/{name}.py"
    options = Program(kind="program", command=[sys.executable, str(file)], max_turns=20, score=f"{file}:grade")
    template = Template(tokenizer, (tokenizer.eos_token_id,))
    problem = requests(tokenizer)[0].problem
    (response,) = said(options, template, problem, [*texts, "Answer:7"], 9000)
    assert response.score.error is None and len(response.segments) == segments - 1, response.score
    assert response.score.reward == float(name == "compacting_agent")
