"""Real engine processes that are killed and stopped at bad moments: the pool's answers equal those of one engine in
this process."""

import os
import re
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from megatron_rft.inference import weight_sync
from megatron_rft.inference.acceptance import metrics
from megatron_rft.inference.engine import Engine, EngineLost, Request, Sampling
from megatron_rft.inference.hf.engine import HFEngine
from megatron_rft.inference.pool import EnginePool, shares
from megatron_rft.inference.process import EngineProcess
from megatron_rft.utils.end_with_parent import children
from megatron_rft.utils.errors import RunFailed
from tests.fork_server import ForkedEngine, server
from tests.unit.inference.tiny import hf_stream

SAMPLING = Sampling(24, stop_token_ids=(2,))
REQUESTS = [Request(i, tuple(range(3, 6 + i % 4)), 4, i) for i in range(8)]


class Gated(HFEngine):
    """Waits after each group while a file exists, so that a test can kill it in the middle."""

    def __init__(self, config, gate: Path):
        super().__init__(config, max_batch_sequences=8)
        self.gate = gate

    def generate(self, requests, sampling):
        gated = self.gate.exists()  # a generation whose last group was taken before the file was made goes on
        for group in super().generate(requests, sampling):
            yield group
            while gated and self.gate.exists():
                time.sleep(0.01)


class Joining(HFEngine):
    """Generates what joined after what it began with."""

    joins = True

    def generate(self, requests, sampling):
        self.joined = requests
        while self.joined:
            now, self.joined = self.joined, []
            yield from super().generate(now, sampling)

    def add(self, requests):
        self.joined += requests


def fails(*_):
    print("no such device: imaginary")
    raise OSError("no engine today")


def test_several_threads_share_an_engine_process(model, engine, tmp_path):
    """Each gets the answers to its own requests, or learns that the process is lost."""
    process = EngineProcess(partial(Joining, model.config), "an engine", tmp_path / "log")
    assert process.joins
    weight_sync.send(hf_stream(model), process, 3)
    with ThreadPoolExecutor(len(REQUESTS)) as threads:
        found = threads.map(lambda request: list(process.generate([request], SAMPLING)), REQUESTS)
        expected = {group.id: group for group in engine.generate(REQUESTS, SAMPLING)}
        for request, groups in zip(REQUESTS, found, strict=True):
            assert [group.id for group in groups] == [request.id]
            own = [response.token_ids for response in groups[0].responses]
            assert own == [response.token_ids for response in expected[request.id].responses]
        os.kill(process.process.pid, signal.SIGKILL)
        for job in [threads.submit(lambda: list(process.generate(REQUESTS[:1], SAMPLING))) for _ in REQUESTS]:
            with pytest.raises(EngineLost):
                job.result()
    process.close()


@pytest.fixture
def forked(monkeypatch):
    """Engine processes start in half a second; the test above starts a new interpreter."""
    server(())  # a child of this process as well: tests count theirs
    monkeypatch.setattr(subprocess, "Popen", ForkedEngine)


@pytest.fixture
def gate(tmp_path) -> Path:
    return tmp_path / "gate"


@pytest.fixture
def pool(model, tmp_path, gate, forked):
    """Two processes; a replacement of a lost one gets the weights of `model`."""
    build = partial(Gated, model.config, gate)
    members = [EngineProcess(build, f"engine process {i}", tmp_path / f"{i}.log") for i in range(2)]
    pool = EnginePool(members, torch.float32)
    pool.reload = lambda: weight_sync.send(hf_stream(model), pool, 3, verify=True)
    yield pool
    pool.close()


def kill(engine: EngineProcess) -> None:
    os.kill(engine.process.pid, signal.SIGKILL)
    engine.process.wait()


def answers(groups) -> dict[int, list]:
    found = list(groups)
    assert len({group.id for group in found}) == len(found), "a request was answered twice"
    return {group.id: [r.token_ids for r in group.responses] for group in found}


def test_killed_in_generation_and_in_a_sync(pool, model, engine, gate):
    expected = answers(engine.generate(REQUESTS, SAMPLING))
    weight_sync.send(hf_stream(model), pool, 3, verify=True)
    assert not pool.recover()
    assert answers(pool.generate(REQUESTS, SAMPLING)) == expected
    first, second = pool.members
    readers = [member._reader for member in pool.members]

    gate.touch()
    found = pool.generate(REQUESTS, SAMPLING)
    groups = [next(found), next(found)]  # one of each
    kill(second)
    gate.unlink()
    assert answers([*groups, *found]) == expected
    assert pool.restarts == 1 and "engine process 1 was killed by SIGKILL" in pool.news[0]

    def killing(stream):
        for number, pair in enumerate(stream):
            if number == 5:
                kill(first)
            yield pair

    weight_sync.send(killing(hf_stream(model)), pool, 4, verify=True)
    assert pool.lost and pool.recover() and pool.restarts == 2
    assert answers(pool.generate(REQUESTS, SAMPLING)) == expected

    def reload():
        first.silence_timeout_s = 300
        weight_sync.send(hf_stream(model), pool, 3, verify=True)

    pool.reload = reload
    first.silence_timeout_s = 4
    os.kill(first.process.pid, signal.SIGSTOP)
    assert answers(pool.generate(REQUESTS, SAMPLING)) == expected
    assert pool.restarts == 3 and re.match(r"engine process 0 (is silent|gets nothing done) for 4 s", pool.news[-1])

    # The next process's connection may reuse the descriptor of the lost one's, so no thread may still read it.
    assert not any(reader.is_alive() for reader in readers)
    pids = [member.process.pid for member in pool.members]
    pool.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_an_engine_that_does_not_start_says_why(tmp_path, forked):
    before = set(children(os.getpid()))
    with pytest.raises(RunFailed, match="OSError: no engine today"):
        EngineProcess(fails, "engine process 0", tmp_path / "log")
    assert "no such device: imaginary" in (tmp_path / "log").read_text()
    with pytest.raises(RunFailed, match=r"(is silent|gets nothing done) for 0.2 s\. It was starting; its log ends:\n"):
        EngineProcess(partial(time.sleep, 600), "engine process 0", tmp_path / "log", 0.2)
    assert set(children(os.getpid())) <= before


class Doomed(Engine):
    """Is lost in every generation."""

    name, dtype = "the doomed", torch.float32

    def start(self):
        pass

    def generate(self, requests, sampling):
        raise EngineLost("the doomed was killed")
        yield

    def load_weights(self, stream, version):
        list(stream)

    def checksums(self):
        return {}

    def close(self):
        pass


def test_requests_are_asked_again_once(model):
    pool = EnginePool([Doomed()], torch.float32)
    pool.reload = lambda: weight_sync.send(hf_stream(model), pool, 3)
    with pytest.raises(RunFailed, match="the doomed was killed a second time"):
        list(pool.generate(REQUESTS, SAMPLING))
    assert pool.restarts == 1


def test_refused_weights_stop_the_run_and_name_the_tensor(model, tmp_path, forked):
    engine = EngineProcess(partial(HFEngine, model.config), "engine process 0", tmp_path / "log")
    pool = EnginePool([engine], torch.float32)
    bad = [(name, tensor * torch.nan if "q_norm" in name else tensor) for name, tensor in hf_stream(model)]
    with pytest.raises(RunFailed, match="version 7: model.layers.0.self_attn.q_norm.weight has non-finite"):
        weight_sync.send(bad, pool, 7)
    weight_sync.send(hf_stream(model), pool, 8, verify=True)  # it is alive, and takes good ones
    assert next(pool.generate(REQUESTS, SAMPLING)).responses[0].weight_version == 8
    pool.close()


def test_an_engine_that_is_lost_while_others_are_counted(model):
    """It is replaced and reported together with them."""

    class Other(Doomed):
        name = "the other"

    pool = EnginePool([Doomed(), Other()], torch.float32)
    pool.reload = lambda: None
    pool.lost = {0: "the doomed was killed"}
    asked = []

    def gather(mine):
        if not asked:
            pool.lost[1] = "the other was killed"
        asked.append(mine)
        return mine

    pool.gather = gather
    assert pool.recover() and pool.restarts == 2 and not pool.lost
    assert [line.partition(";")[0] for line in pool.news] == ["the doomed was killed", "the other was killed"]


def test_a_rank_without_an_engine_keeps_up(model):
    pool = EnginePool([], torch.float32, driver=(None, 1))
    weight_sync.send(hf_stream(model), pool, 3, verify=True)
    assert list(pool.generate([], SAMPLING)) == []


@pytest.mark.parametrize(
    "engines, world, expected",
    [
        (1, 1, [([0], 0, 1)]),
        (4, 2, [([0, 2], 0, 2), ([1, 3], 1, 2)]),
        (2, 4, [([0], 0, 2), ([], None, 2), ([1], 1, 2), ([], None, 2)]),
    ],
)
def test_shares(engines, world, expected):
    found = [shares(engines, rank, world) for rank in range(world)]
    assert [(list(mine), *rest) for mine, *rest in found] == expected


class Drafting(Doomed):
    def __init__(self, *passes):
        self.counted = passes

    def statistics(self):
        return metrics(*self.counted) if self.counted else {}


def test_drafts_are_counted_over_all_engines():
    pool = EnginePool([Drafting(2, 8, 2), Drafting(), Drafting(6, 24, 10)], torch.float32)
    assert (
        pool.statistics() == metrics(8, 32, 12) | {"faults/engine_restarts": 0.0}
        and metrics(8, 32, 12)["speculation/tokens_per_step"] == 2.5
    )
