"""What a run does with its engines before and after a step; tests/integration and tests/parity have processes and
servers."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from megatron_rft.inference.engine import Request, Sampling
from megatron_rft.inference.hf.engine import HFEngine
from megatron_rft.inference.weight_sync import EngineWeights
from megatron_rft.training import engines
from megatron_rft.training.engines import EngineBuilder, devices, engines_of_node
from megatron_rft.utils.errors import ConfigError
from tests.made import recipe
from tests.shapes import sizes

CONFIG = LlamaConfig(**sizes(1, 16, 2, 2, 16, vocab_size=8))


class ForgetfulEngine(HFEngine):
    """Like vLLM on a GPU: sleep discards its contents, and it must be woken before use."""

    asleep = False

    def sleep(self):
        self.asleep, self.weight_version = True, -1
        for parameter in self.model.parameters():
            torch.nn.init.constant_(parameter, float("nan"))

    def wake(self, cache=True):
        self.asleep = False

    def load_weights(self, stream, version):
        assert not self.asleep
        super().load_weights(stream, version)


class Actor:
    def __init__(self):
        self.weights = AutoModelForCausalLM.from_config(CONFIG).state_dict()

    def stream(self, dtype):
        return iter(self.weights.items())


def test_an_engine_inside_the_rank_sleeps_while_the_rank_trains():
    engine = ForgetfulEngine(CONFIG)
    weights = EngineWeights(Actor(), engine)
    weights.send(0, verify=True)

    def generated():
        (group,) = engine.generate([Request(0, (1, 2, 3), 2, seed=1)], Sampling(6, temperature=0.0))
        return [response.token_ids for response in group.responses]

    before = generated()
    weights.sleep()
    assert engine.asleep
    weights.send(1)
    assert not engine.asleep and generated() == before


def test_weights_are_named_by_their_step_and_their_bits():
    actor, names = Actor(), []
    weights = EngineWeights(actor, HFEngine(CONFIG))
    weights.named = True
    for step, change in ((3, 0.0), (3, 0.0), (3, 1e-6), (4, 0.0)):
        actor.weights["model.norm.weight"][0] += change
        weights.send(step)
        names.append(weights.name)
    assert (
        names[0] == names[1]
        and len(set(names)) == 3
        and [name[:7] for name in names[1:]] == [*["000003_"] * 2, "000004_"]
    )


def test_the_trainer_makes_room_for_an_engine_that_is_awake():
    """Also while the engine starts, when all moments exist, and gets its weights, after which it allocates the
    cache."""
    events = []

    class Recorded:
        def __init__(self, **answers):
            self.answers = answers

        def __getattr__(self, name):
            return lambda *given, **named: (events.append((name, *named.values())), self.answers.get(name, {}))[1]

    class Builder(EngineBuilder):
        def build(self, hf_config):
            events.append(("start",))
            return Recorded()

    actor, critic = (
        SimpleNamespace(training_state=Recorded(), optimizer=Recorded(), stream=lambda dtype: [], hf_config=CONFIG)
        for _ in range(2)
    )
    engine, weights = Builder(recipe(rollout={"offload_trainer": True})).build_beside([actor, critic])
    away, back = [("offload",)] * 2, [("restore",)] * 2
    assert events == [*[("fill_in",)] * 2, *away, ("start",), ("sleep",), *back]
    events.clear(), weights.send(0)
    assert events == [*away, ("wake", False), ("load_weights",), ("wake",), ("recover",)]
    events.clear(), weights.wake()
    assert not events  # it is
    weights.sleep_to_save(), weights.wake()
    assert events == [("sleep",), *back, *away, ("wake", False), ("load_weights",), ("wake",), ("recover",)]
    engine, weights = Builder(recipe()).build_beside([actor])
    events.clear(), weights.send(0), weights.sleep_to_save(), weights.sleep()
    assert events == [("wake", False), ("load_weights",), ("wake",), ("recover",), ("sleep",)]


def test_each_engine_has_its_gpus():
    assert [devices(index, 1, ["2", "3"], "0") for index in range(3)] == [["2"], ["3"], ["2"]]
    assert [devices(index, 2, ["3", "4", "5", "6", "7"], "0") for index in range(3)] == [
        ["3", "4"],
        ["5", "6"],
        ["3", "4"],
    ]
    assert devices(1, 1, [], "0") == ["0"]
    with pytest.raises(ConfigError, match="a server takes 4 GPUs, and 3 of this node's are without a rank"):
        devices(0, 4, ["1", "2", "3"], "0")
    with pytest.raises(ConfigError, match="a server takes 2 GPUs, and 0 of"):
        devices(0, 2, [], "0")


@pytest.mark.parametrize(
    "ranks, count, mine",
    [
        (1, 4, [[0, 2], [1, 3]]),  # two nodes of one rank and two GPUs without one
        (2, 8, [[0, 4, 1, 5], [0, 4, 1, 5], [2, 6, 3, 7], [2, 6, 3, 7]]),
        (2, 2, [[0], [0], [1], [1]]),
    ],
)
def test_engines_of_a_node(monkeypatch, ranks, count, mine):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    for rank, expected in enumerate(mine):
        monkeypatch.setenv("LOCAL_RANK", str(rank % ranks))
        assert engines_of_node(count, rank, len(mine)) == expected


@pytest.mark.parametrize(
    "options, gpus, expected",
    [
        ({"placement": "process"}, "0,1,2,3", True),  # one on each of two
        ({"placement": "process", "processes": 4}, "0,1,2,3", False),
        ({"placement": "process"}, "0,1", False),  # beside the ranks
        ({"placement": "server", "processes": 1}, "0,1,2", True),
    ],
)
def test_who_has_a_gpu_to_itself(monkeypatch, options, gpus, expected):
    builder = EngineBuilder(recipe(rollout=options))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(engines, "dist", SimpleNamespace(get_rank=lambda: 1, get_world_size=lambda: 2))
    for name, value in {"CUDA_VISIBLE_DEVICES": gpus, "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert builder.alone() is expected


def test_too_few_gpus_are_told_before_anything_is_loaded(monkeypatch):
    builder = EngineBuilder(recipe(rollout={"placement": "server"}, vllm={"tensor_parallel_size": 2}))
    builder.check_gpus()  # on a CPU a worker is a process
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    for ranks in ("1", "2"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        with pytest.raises(ConfigError, match="a server takes 2 GPUs, and 1 of") if ranks == "2" else nullcontext():
            builder.check_gpus()
