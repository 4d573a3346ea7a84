"""A real vLLM server with two workers: its answers equal those of transformers, its weights are verified, it is
replaced after a kill, and it leaves no process."""

import os
import re
import signal
import threading
import time
from copy import copy
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from megatron_rft.inference import weight_sync
from megatron_rft.inference.engine import Request, Sampling
from megatron_rft.inference.hf.engine import HFEngine
from megatron_rft.inference.pool import EnginePool
from megatron_rft.inference.process import EngineProcess
from megatron_rft.inference.vllm.engine import VLLMEngine
from megatron_rft.inference.vllm.server_client import ServerEngine
from megatron_rft.inference.vllm.server_process import LocalServer
from megatron_rft.plan.vllm import unusable
from megatron_rft.utils.end_with_parent import children
from megatron_rft.utils.errors import ConfigError, RunFailed
from megatron_rft.utils.processes import STOP_SIGNALS, reserved_port
from tests.parity.launch import EVERYTHING
from tests.shapes import sizes
from tests.unit.inference.tiny import assert_supports

SHAPE = sizes(2, 128, 4, 2, 96)
CONFIG = Qwen3Config(**SHAPE, vocab_size=64, head_dim=32, max_position_embeddings=2048, tie_word_embeddings=True)
# The last prompt fills blocks of the prefix cache: keys and values of old weights would change its answers.
REQUESTS = [Request(i, tuple(range(3, 9 + i)), 2, i) for i in range(6)]
REQUESTS += [Request(6, tuple(3 + i * i % 61 for i in range(300)), 2, 6)]
TRUNCATED = Sampling(20, 0.4, top_p=0.9, top_k=5, stop_token_ids=(2,))
GREEDY = Sampling(20, temperature=0.0, stop_token_ids=(2,))
SMALL = {"max_model_len": 2048, "max_num_seqs": 64, "tensor_parallel_size": 2}


def weights(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIG)
    return {n: p.detach() * (1 if p.ndim == 1 or "embed" in n else 4) for n, p in model.named_parameters()}


def family(pid: int) -> list[int]:
    found = children(pid)
    return found + [each for child in found for each in family(child)]


def assert_equal(server, seed: int, version: int) -> None:
    """Asserts that answers equal transformers' with the same weights, greedily, in fp32."""
    local = HFEngine(CONFIG)
    local.load_weights(weights(seed).items(), version)
    expected = {group.id: group.responses for group in local.generate(REQUESTS, GREEDY)}
    found = {group.id: group.responses for group in server.generate(REQUESTS, GREEDY)}
    assert found.keys() == expected.keys()
    for id, responses in found.items():
        for one, other in zip(responses, expected[id], strict=True):
            assert one.token_ids == other.token_ids and one.finish_reason == other.finish_reason
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
            assert one.weight_version == version


def running(server: ServerEngine) -> float:
    """The number of responses that the server is generating."""
    (count,) = re.findall(r"^vllm:num_requests_running\S* (\S+)$", server._text("GET", "/metrics"), re.MULTILINE)
    return float(count)


def killing(stream, pid: int):
    """The stream; a process is killed in its middle."""
    for number, pair in enumerate(stream):
        if number == 5:
            os.kill(pid, signal.SIGKILL)
        yield pair


def while_alive(stream, writing: threading.Thread):
    """The stream; the thread has not ended at any of its tensors, which go to a server that has paused."""
    for pair in stream:
        assert writing.is_alive(), "it was not in the middle of it"
        yield pair


def descendants(pid: int) -> list[int]:
    return sorted(found for child in children(pid) for found in (child, *descendants(child)))


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.skipif(unusable() is not None, reason=str(unusable()))
def test_a_server(tmp_path):
    server = LocalServer(CONFIG, torch.float32, tmp_path / "server.log", {"OMP_NUM_THREADS": "1"}, SMALL)
    pool = EnginePool([server], torch.float32)
    pool.reload = lambda: weight_sync.send(weights(2).items(), pool, 2, verify=True)
    try:
        for version in (1, 2):
            weight_sync.send(weights(version).items(), pool, version, verify=True)
            assert_equal(pool, version, version)
        server_and_engine = descendants(server.process.pid)
        assert len(server_and_engine) > 1
        for pid in server_and_engine:  # what `scontrol requeue` does: the run's servers outlive it
            for number in STOP_SIGNALS:
                os.kill(pid, number)
        assert_equal(pool, 2, 2)
        assert descendants(server.process.pid) == server_and_engine
        local = AutoModelForCausalLM.from_config(CONFIG).eval()
        local.load_state_dict(weights(version), strict=False)
        assert_supports(local, REQUESTS, {g.id: g.responses for g in pool.generate(REQUESTS, TRUNCATED)}, TRUNCATED)

        with pytest.raises(ConfigError, match="serves another model: its vocab_size is 64, that of model.path 65"):
            ServerEngine(
                server.url,
                Qwen3Config(**SHAPE, vocab_size=65),
                torch.float32,
                authorization=server.authorization,
            )
        with pytest.raises(ConfigError, match="computes in torch.float32, and rollout.dtype says torch.bfloat16"):
            ServerEngine(server.url, CONFIG, torch.bfloat16, authorization=server.authorization)
        with pytest.raises(
            ConfigError, match="room for 2048 tokens of prompt and response, and this recipe has up to 2049"
        ):
            ServerEngine(server.url, CONFIG, torch.float32, longest=2049, authorization=server.authorization)

        with pytest.raises(
            ConfigError, match="cannot take weights from a trainer .*401 this server answers only to its"
        ):
            ServerEngine(server.url, CONFIG, torch.float32, authorization={"Authorization": "Bearer guess"})
        stranger = copy(server)
        stranger.authorization = {}
        for path in ("/update_weights", "/collective_rpc", "/inference/v1/generate", "/v1/completions", "/pause"):
            with pytest.raises(RunFailed, match="refuses .*: 401"):
                stranger._text("POST", path, {})

        answers: list = []
        asked = Request(0, (5, 6, 7), 4, 1)
        writing = threading.Thread(target=lambda: answers.extend(pool.generate([asked], Sampling(2000))))
        writing.start()
        while not running(server):
            assert writing.is_alive(), "it was over before new weights came"
            time.sleep(0.01)
        weight_sync.send(while_alive(weights(3).items(), writing), server, 3)
        writing.join()
        assert [len(r.token_ids) for r in answers[0].responses] == [2000] * 4
        begun = sorted(r.weight_version for r in answers[0].responses)
        assert begun[0] == 2 and begun[-1] in (2, 3)  # one that the server had not begun yet has the new weights
        assert_equal(pool, 3, 3)

        bad = weights(4)
        bad["model.layers.1.self_attn.q_norm.weight"] *= torch.nan
        with pytest.raises(RunFailed, match="version 4: model.layers.1.self_attn.q_norm.weight has non-finite"):
            weight_sync.send(bad.items(), pool, 4)
        weight_sync.send(weights(2).items(), pool, 2)

        processes = family(server.process.pid)
        assert len(processes) >= 2  # the server, and its engine
        weight_sync.send(killing(weights(2).items(), processes[-1]), pool, 2, verify=True)
        assert pool.lost and pool.recover() and pool.restarts == 1
        assert_equal(pool, 2, 2)

        processes += family(server.process.pid)
        if EVERYTHING:  # each start takes half a minute
            groups = pool.generate(REQUESTS, GREEDY)
            os.kill(family(server.process.pid)[0], signal.SIGKILL)
            assert {group.id for group in groups} == {request.id for request in REQUESTS}
            assert pool.restarts == 2
            assert_equal(pool, 2, 2)
            processes += family(server.process.pid)
    finally:
        pool.close()
    assert not [pid for pid in processes if Path(f"/proc/{pid}").exists()]


def test_nobody_there():
    with (
        reserved_port() as nobody,
        pytest.raises(
            ConfigError, match=r"no vLLM server answers at http://127.0.0.1:\d+ \(.*refused.*\n.*api_server --model"
        ),
    ):
        ServerEngine(f"http://127.0.0.1:{nobody.getsockname()[1]}", CONFIG, torch.float32)


@pytest.mark.slow
@pytest.mark.skipif(unusable() is not None, reason=str(unusable()))
def test_vllm_in_a_process_of_its_own(tmp_path):
    """The answers are the same, also after new weights in the middle of them."""
    options = {"max_model_len": 2048, "max_batch_sequences": 64}
    build = partial(VLLMEngine, CONFIG, torch.float32, "cpu", **options)
    engine = EngineProcess(build, "engine process 0", tmp_path / "log", 300, 120, {"OMP_NUM_THREADS": "1"})
    try:
        weight_sync.send(weights(1).items(), engine, 1, verify=True)
        assert_equal(engine, 1, 1)
        found = engine.generate([Request(0, (5, 6, 7), 4, 1), Request(1, (5, 6), 1, 1, max_tokens=2)], Sampling(1500))
        assert next(found).id == 1  # from now on it is in the middle of the other
        weight_sync.send(weights(2).items(), engine, 2)
        assert [(len(r.token_ids), r.weight_version) for r in next(found).responses] == [(1500, 1)] * 4
        assert list(found) == []
        assert_equal(engine, 2, 2)
    finally:
        engine.close()
