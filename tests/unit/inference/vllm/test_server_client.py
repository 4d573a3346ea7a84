"""The client's requests to a server, and its messages about unsuitable servers. tests/parity has a real server."""

import json
import queue
import shlex
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen3Config

from megatron_rft.inference.engine import EngineLost, Request, Sampling
from megatron_rft.inference.transport import network
from megatron_rft.inference.vllm import server_client
from megatron_rft.inference.vllm.arguments import RUNNER, command, flag
from megatron_rft.inference.vllm.server_client import ServerEngine, local_address
from megatron_rft.training.engines import EngineBuilder
from megatron_rft.utils.errors import ConfigError, RunFailed
from tests.integration.tiny import wait_until
from tests.made import recipe
from tests.unit.inference.tiny import SHAPE

ROOT = Path(__file__).resolve().parents[4]
CONFIG = Qwen3Config(**SHAPE)
FACTS = {name: getattr(CONFIG, name) for name in ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")}
FACTS |= {"dtype": "torch.float32", "max_model_len": 512, "workers": 1, "replicas": 1, "sequences": 128}
FACTS |= {"vllm": "0.32.0", "transfer": "wire", "logprobs_mode": "processed_logprobs", "chunked_prefill": False}
FACTS |= {"prefix_caching": True, "gpu": None, "quantization": None, "kv_cache_dtype": "auto"}


@contextmanager
def answering(
    facts: dict | str,
    hangs: tuple[str, ...] = (),
    metrics: str = "",
    dies: str = "",
    lacks: str = "",
    sent: threading.Event | None = None,
    choices: list[dict] | None = None,
):
    """A server that answers only questions about itself. It never answers `hangs`, lacks `lacks`, and its engine dies
    when it is asked for `dies`: the request fails, and later the server reports that it is broken. It answers
    /update_weights when all is `sent`, and requests for responses with `choices`. Returns (its URL, its requests)."""
    asked: list[str] = []
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            if self.command == "GET" and self.path == "/inference/v1/generate":
                self.send_error(404 if self.path == lacks else 405)
                return
            asked.append(self.path)
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            answer = "healthy"
            if self.path in hangs:
                over.wait()
                return
            if self.path == "/update_weights" and sent:
                sent.wait()
            if self.path == "/collective_rpc":
                about = facts if b"rft_facts" in body else {"problem": None}
                answer = about if isinstance(about, str) else json.dumps({"results": [about]})
            elif choices and self.path == "/inference/v1/generate":
                answer = json.dumps({"choices": choices})
            elif self.path != "/health":
                answer = metrics if self.path == "/metrics" else ""
            broken = self.path == "/health" and dies in asked and asked.count("/health") > 2
            self.send_response(503 if broken else 500 if self.path == dies else 200)
            self.end_headers()
            self.wfile.write(answer.encode())

        do_POST = do_GET

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        over.set()
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    "facts, words",
    [
        (
            FACTS | {"max_model_len": 100},
            "has room for 100 tokens of prompt and response, and this recipe has up to 200",
        ),
        (
            FACTS | {"quantization": "awq"},
            "was started with --quantization awq, .* cannot be verified after a sync: use fp8, fp8_per_tensor",
        ),
        (FACTS | {"vllm": "0.33.1"}, "runs vLLM 0.33.1; this package supports 0.32.x"),
        ({"model_type": "qwen3"}, "runs vLLM None; this package supports 0.32.x"),
        (FACTS | {"transfer": None}, "another transfer, None, and wire is needed. .*\n.*--weight-transfer-config"),
        (FACTS | {"logprobs_mode": "raw_logprobs"}, "another logprobs mode, raw_logprobs, and processed_logprobs is n"),
        (FACTS | {"chunked_prefill": True}, "another chunked prefill, True, and False is needed"),
        (FACTS | {"replicas": 2}, "has 2 data-parallel replicas behind one URL"),
        (FACTS | {"vocab_size": 65}, "serves another model: its vocab_size is 65"),
        ('{"results": []}', "cannot take weights from a trainer .*is no vLLM"),
        ("<html>", "cannot take weights from a trainer .*is no vLLM server: /collective_rpc is answered with '<html>'"),
    ],
)
def test_refused_before_training(facts, words):
    with answering(facts) as (url, _), pytest.raises(ConfigError, match=words):
        ServerEngine(url, CONFIG, torch.float32, longest=200)


def test_a_server_without_the_end_point_of_token_ids():
    words = r"(?s)takes no token ids .*/inference/v1/generate: 404.*\nVLLM.*_RUNNER=0 python .*--enable-scale-out"
    with answering(FACTS, lacks="/inference/v1/generate") as (url, _), pytest.raises(ConfigError, match=words):
        ServerEngine(url, CONFIG, torch.float32)


def test_kept_caches_are_not_for_later_responses():
    with answering(FACTS) as (url, _), pytest.raises(ConfigError, match="start it with --no-enable-prefix-caching"):
        ServerEngine(url, CONFIG, torch.float32, keep_caches=True)


def test_draft_tokens_are_counted(monkeypatch):
    """Counts since the last call, over all engines of the server."""
    monkeypatch.setattr(ServerEngine, "_connect", lambda self: None)
    counted = "\n".join(
        f'vllm:spec_decode_num_{name}_total{{engine="{i}",model_name="m"}} {value}'
        for i in (0, 1)
        for name, value in (("drafts", 4.0), ("draft_tokens", 12.0), ("accepted_tokens", 6.0), ("x_per_pos", 9.0))
    )
    with answering(FACTS, metrics="# HELP\n" + counted) as (url, _):
        engine = ServerEngine(url, CONFIG, torch.float32)
        assert engine.statistics() == {
            "speculation/passes": 8,
            "speculation/proposed": 24,
            "speculation/accepted": 12,
            "speculation/tokens_per_step": 2.5,
        }
        assert engine.statistics() == {}


def test_nothing_is_generated_while_weights_arrive(monkeypatch):
    """Also if nothing is being generated at first: a request may arrive meanwhile."""
    monkeypatch.setattr(ServerEngine, "_connect", lambda self: None)
    monkeypatch.setattr(network, "send", lambda group, stream: list(stream))
    with answering(FACTS) as (url, asked):
        engine = ServerEngine(url, CONFIG, torch.float32)
        asked.clear()
        engine.load_weights(iter([]), version=1)
    assert asked[0] == "/pause?mode=keep" and asked[-1] == "/resume"
    assert asked.index("/update_weights") < asked.index("/finish_weight_update") < len(asked) - 2


def test_weights_may_take_longer_than_the_limit_of_silence(monkeypatch):
    """Each part has that limit, in the link."""
    monkeypatch.setattr(ServerEngine, "_connect", lambda self: None)
    sent, call = threading.Event(), ServerEngine._call

    def limited(self, method, path, *more):
        if path == "/update_weights":
            self.silence_timeout_s = 1.0
        return call(self, method, path, *more)

    def send(group, stream):
        assert wait_until(lambda: "/update_weights" in asked)
        time.sleep(3)
        engine.silence_timeout_s = 300.0  # of the calls that follow: a busy machine may take long
        sent.set()

    monkeypatch.setattr(ServerEngine, "_call", limited)
    monkeypatch.setattr(network, "send", send)
    with answering(FACTS, sent=sent) as (url, asked):
        engine = ServerEngine(url, CONFIG, torch.float32)
        engine.load_weights(iter([]), version=1)
        assert asked[-1] == "/resume"


@pytest.mark.parametrize("fails", [False, True])
def test_a_server_that_never_says_that_it_has_the_weights(monkeypatch, fails):
    monkeypatch.setattr(ServerEngine, "_connect", lambda self: None)

    def send(group, stream):
        engine.silence_timeout_s = 1.0
        if fails:
            raise RunFailed("the trainer's own error")

    monkeypatch.setattr(network, "send", send)
    with answering(FACTS, hangs=("/update_weights",)) as (url, _):
        engine = ServerEngine(url, CONFIG, torch.float32)
        with pytest.raises(RunFailed, match="own error" if fails else "does not answer: timed out"):
            engine.load_weights(iter([]), version=1)
        assert not engine._open


@pytest.mark.parametrize("dies", ["/update_weights", "/finish_weight_update"])
def test_an_engine_that_dies_while_it_gets_weights(monkeypatch, dies):
    """The error says that it is lost, not that it refuses a tensor."""
    monkeypatch.setattr(ServerEngine, "_connect", lambda self: None)
    monkeypatch.setattr(network, "send", lambda group, stream: list(stream))
    monkeypatch.setattr(server_client.time, "sleep", lambda seconds: None)
    with answering(FACTS, dies=dies) as (url, _):
        engine = ServerEngine(url, CONFIG, torch.float32)
        with pytest.raises(EngineLost, match="is broken: 503"):
            engine.load_weights(iter([]), version=1)


def test_an_engine_that_hangs_behind_a_healthy_server(monkeypatch):
    """It returns neither its responses nor its health."""
    monkeypatch.setattr(ServerEngine, "_connect", lambda self: None)
    monkeypatch.setattr(server_client, "PING_S", 0.1)
    with answering(FACTS, hangs=("/inference/v1/generate", "/is_paused")) as (url, asked):
        engine = ServerEngine(url, CONFIG, torch.float32)
        engine.silence_timeout_s = 1.0
        with pytest.raises(EngineLost, match="does not answer: timed out"):
            list(engine.generate([Request(0, (3, 4), 2, seed=1)], Sampling(4)))
        assert wait_until(lambda: "/is_paused" in asked)  # the client may have given up before the server reads it


@pytest.mark.parametrize("written", [(), (5, 6)])
def test_a_response_that_an_ending_server_has_aborted_is_asked_for_again(monkeypatch, written):
    """vLLM answers what is unfinished with status 200 and the tokens so far when SIGTERM or Ctrl-C ends it."""
    monkeypatch.setattr(ServerEngine, "_connect", lambda self: None)
    versions = [{"version": "3", "start": 0, "end": 2}] if written else []
    choice = {"token_ids": list(written), "finish_reason": "abort", "weight_versions": versions}
    choice["logprobs"] = {"content": [{"token_id": token, "logprob": -1.0} for token in written]}
    with answering(FACTS, choices=[choice]) as (url, _):
        engine = ServerEngine(url, CONFIG, torch.float32)
        with pytest.raises(EngineLost, match="is ending: it has aborted a response"):
            list(engine.generate([Request(0, (3, 4), 1, seed=1)], Sampling(4)))


def test_a_lost_server_is_waited_for_until_its_engine_answers(monkeypatch):
    """The old one may still say that it is healthy while its engine ends."""
    monkeypatch.setattr(ServerEngine, "_connect", lambda self: None)
    monkeypatch.setattr(server_client.time, "sleep", lambda seconds: None)
    text, ending = ServerEngine._text, iter([True] * 3)

    def ask(self, method, path, *more, **named):
        if path == "/is_paused" and next(ending, False):
            raise EngineLost("it is ending")
        return text(self, method, path, *more, **named)

    with answering(FACTS) as (url, asked):
        engine = ServerEngine(url, CONFIG, torch.float32)
        assert asked == ["/health", "/collective_rpc"]
        monkeypatch.setattr(ServerEngine, "_text", ask)
        engine.start()
        assert asked[2:] == ["/is_paused", "/collective_rpc"] and next(ending, None) is None


def test_a_request_that_comes_after_the_end_is_not_waited_for(monkeypatch):
    """A thread that sends a request after the others were cancelled would wait forever."""
    monkeypatch.setattr(ServerEngine, "_connect", lambda self: None)
    with answering(FACTS, hangs=("/inference/v1/generate",)) as (url, asked):
        engine = ServerEngine(url, CONFIG, torch.float32)
        ended, epoch = queue.Queue(), engine._epoch
        arguments = Request(0, (3, 4), 1, seed=1), 0, Sampling(4), dict, ended
        waiting = threading.Thread(target=engine._ask, args=(*arguments, epoch))
        waiting.start()
        assert wait_until(lambda: "/inference/v1/generate" in asked)
        engine.close()
        waiting.join(300)
        late = threading.Thread(target=engine._ask, args=(*arguments, epoch), daemon=True)
        late.start()
        late.join(300)
        assert not waiting.is_alive() and not late.is_alive() and not engine._open
        answers = [ended.get()[2] for _ in range(2)]
        assert all(isinstance(each, EngineLost) for each in answers) and asked.count("/inference/v1/generate") == 1


def test_the_address_that_a_server_reaches_this_machine_by():
    assert local_address("http://127.0.0.1:8000/v1") == local_address("http://localhost") == "127.0.0.1"
    assert flag("enforce_eager", False) == ["--no-enforce-eager"]


def test_arguments_of_a_server():
    """Prompts are not split, however long; a draft model has its own weights."""
    drafts = {"method": "draft_model", "model": "small", "num_speculative_tokens": 4}
    rollout = {"max_batch_sequences": 16, "max_response_tokens": 30000}
    builder = EngineBuilder(recipe(rollout=rollout, vllm={"speculative_config": drafts}))
    arguments = builder.server_arguments(SimpleNamespace(max_position_embeddings=20000))
    assert arguments == {
        "max_model_len": 20000,
        "max_num_seqs": 16,
        "speculative_config": drafts | {"draft_load_config": {"load_format": "auto"}},
    }
    line = command("model", torch.bfloat16, arguments=arguments)
    assert line[line.index("--max-num-batched-tokens") + 1] == "20000"


def test_the_page_has_the_command_of_a_server(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    page = (ROOT / "docs" / "rollout.md").read_text(encoding="utf-8")
    told = page[page.index("VLLM_SERVER_DEV_MODE=1") :].partition("\n\n")[0].replace("\\\n", " ")
    mode, runner, python, *line = shlex.split(told)
    _, *own = command("MODEL", torch.bfloat16, host="HOST", arguments={"max_model_len": 4096})
    assert sorted(" ".join(line).split(" --")) == sorted(" ".join(own).split(" --"))
    assert (mode, python) == ("VLLM_SERVER_DEV_MODE=1", "python") and dict([runner.split("=")]) == RUNNER


def test_a_server_that_keeps_caches_shares_no_prefixes():
    keep = {"staleness": 2, "cache_after_sync": "keep", "placement": "server"}
    builder = EngineBuilder(recipe(rollout=keep, algorithm={"importance": "truncated"}))
    assert builder.server_arguments(SimpleNamespace(max_position_embeddings=64))["enable_prefix_caching"] is False
