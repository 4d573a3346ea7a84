"""Separate sets of moments, and the moving average of a model's weights, also through a checkpoint."""

import sys
from types import SimpleNamespace

import pytest
import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer import optimizer_config as optimizer_config_module
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from transformers import Qwen3Config

from megatron_rft.config import Batching, Megatron
from megatron_rft.megatron import seams, weights
from megatron_rft.megatron.actor import Actor
from megatron_rft.megatron.checkpoint import Checkpointer
from megatron_rft.megatron.ema import MovingAverage
from megatron_rft.megatron.optimizer import optimizer_config
from megatron_rft.objectives.base import counts
from megatron_rft.records import Batch
from megatron_rft.utils.checkpoint_files import latest
from megatron_rft.utils.errors import ConfigError, DataError
from tests.made import made
from tests.shapes import SMALL

CONFIG = Qwen3Config(**SMALL | {"vocab_size": 32}, max_position_embeddings=64, architectures=["Qwen3ForCausalLM"])


def build(distributed: bool, precision: str = "fp32") -> Actor:
    options = {"lr": 1e-2, "use_distributed_optimizer": distributed}
    actor = Actor(CONFIG, Megatron(), Batching(), precision, optimizer=options, moments=("verification",))
    actor.load(weights.random_tensors(CONFIG, seed=0))
    return actor


def batch_of(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 32, (3, 9), generator=generator).tolist()
    return Batch.of([row[:3] for row in ids], [row[3:] for row in ids])


def step(actor: Actor, seed: int, moments: str = "own", **options) -> dict[str, float]:
    batch = batch_of(seed)
    return actor.step(batch, made("sft").loss, counts(batch), learning_rate=1e-2, moments=moments, **options)


def snapshot(actor: Actor) -> torch.Tensor:
    return torch.cat([p.flatten() for p in actor.snapshot()])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("distributed", [False, True])
def test_training_state_leaves_the_device_and_comes_back(one_rank, distributed, precision):
    results = []
    for offloads in (False, True):
        actor = build(distributed, precision)
        state = actor.training_state
        for seed, moments in ((1, "own"), (2, "verification"), (3, "own")):
            step(actor, seed, moments)
            before = snapshot(actor)
            if offloads:
                state.offload(), state.offload()
                kept = {x.untyped_storage().nbytes() for x in actor.optimizer.tensors()}
                assert all(x.untyped_storage().nbytes() == 0 for x in gradients(actor))
                assert kept == {0} or precision == "fp32" and 0 in kept  # then the model's own weights are among them
                assert torch.equal(snapshot(actor), before)
                state.restore(), state.restore()
        results.append(snapshot(actor))
    assert torch.equal(*results)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("distributed", [False, True])
def test_steps_create_no_further_state(one_rank, distributed, precision):
    """So that an engine that measures the free memory at its start leaves room for all of it."""
    actor = build(distributed, precision)
    actor.optimizer.fill_in()
    before = sum(tensor.nbytes for tensor in actor.optimizer.tensors())
    step(actor, 1), step(actor, 2, "verification")
    assert sum(tensor.nbytes for tensor in actor.optimizer.tensors()) == before


def test_pinned_copies_of_state_fill_the_powers_of_two_that_torch_would_round_them_up_to():
    mib, state = 1 << 20, torch.arange((3 << 20) // 4 + 5, dtype=torch.int32)
    assert seams.powers(91 << 30) == [each << 30 for each in (64, 16, 8, 2, 1)]
    assert [seams.powers(size) for size in (0, 7, mib, mib + 7)] == [[], [7], [mib], [mib, 7]]
    storage, acts = state.untyped_storage(), seams.Seams()
    before, copy = state.clone(), acts.save(storage, None)
    assert [len(each) for each in copy] == [2 * mib, mib, 20]
    assert all(a is b for a, b in zip(copy, acts.save(storage, copy), strict=True))
    acts.empty(storage), acts.refill(storage, before.nbytes, copy)
    assert torch.equal(state, before)


def test_fp8_copies_of_weights_do_not_stay_beside_an_engine_or_another_model(one_rank):
    """Here Transformer Engine's layers are played by one of torch."""
    actor = build(True, "bf16")
    layer = actor.models[0].decoder.layers[0]
    layer._fp8_workspaces, actor.config.fp8 = {"weight": torch.zeros(2)}, "hybrid"
    with actor.use_weights(actor.snapshot()):
        assert layer._fp8_workspaces
    assert not layer._fp8_workspaces
    layer._fp8_workspaces["weight"] = torch.zeros(2)
    actor.training_state.offload()
    assert not layer._fp8_workspaces


def gradients(actor: Actor) -> list[torch.Tensor]:
    return [buffer.grad_data for chunk in actor.chunks for buffer in chunk.buffers]


def test_options_that_megatron_core_refuses_together():
    options = {"lr": 1e-2, "use_precision_aware_optimizer": True, "use_distributed_optimizer": False}
    with pytest.raises(ConfigError, match="the section `optimizer`: .*only supported with distributed optimizer"):
        optimizer_config(options, "bf16")


class FusedAdam(torch.optim.Optimizer):
    """The state of Transformer Engine 2.20's optimizer, with the types that it demands. It makes no steps."""

    def __init__(
        self, params, lr, master_weight_dtype, exp_avg_dtype, exp_avg_sq_dtype, store_param_remainders,
        use_decoupled_grad, **_,
    ):  # fmt: skip
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})
        self.remainders = store_param_remainders and master_weight_dtype == torch.float32
        self.dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype, "master_param": master_weight_dtype}

    def initialize_state(self, param, store_param_remainders):
        self.state[param] = {name: torch.zeros_like(param, dtype=dtype) for name, dtype in self.dtypes.items()}
        self.state[param]["master_param"].copy_(param)

    def get_unscaled_state(self, param, name):
        return self.state[param][name].float()

    def set_scaled_state(self, param, name, value):
        assert value.dtype == (torch.int16 if self.remainders and name == "master_param" else torch.float32)
        self.state[param].setdefault(name, torch.zeros_like(param, dtype=self.dtypes[name])).copy_(value)

    def load_state_dict(self, state_dict):
        parameters = [each for group in self.param_groups for each in group["params"]]
        for number, state in state_dict["state"].items():
            for name, value in state.items():
                self.set_scaled_state(parameters[number], name, value.float())


def test_a_precision_aware_optimizer_is_saved_before_its_first_step_and_comes_back(one_rank, tmp_path, monkeypatch):
    for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(FusedAdam=FusedAdam))
    monkeypatch.setattr(megatron_optimizer, "USING_PYTORCH_OPTIMIZER", False)
    for module, other in ((megatron_optimizer, optimizer_config_module), (distrib_optimizer, megatron_optimizer)):
        monkeypatch.setattr(module, "Adam", FusedAdam)
        monkeypatch.setattr(other, "is_te_min_version", lambda _: True)
    monkeypatch.setattr(distrib_optimizer, "HAVE_APEX_OR_TE", True)
    options = {"lr": 1e-2, "use_distributed_optimizer": True, "use_precision_aware_optimizer": True}
    actors = [Actor(CONFIG, Megatron(), Batching(), "bf16", optimizer=options) for _ in range(2)]
    for seed, actor in enumerate(actors):
        actor.load(weights.random_tensors(CONFIG, seed))
    writer, reader = (Checkpointer(tmp_path, {"actor": actor}, asynchronous=False) for actor in actors)
    writer.save(1, {}, {"x": torch.zeros(2)})
    reader.load(latest(tmp_path))
    for one, other in zip(*(list(actor.optimizer.tensors()) for actor in actors), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(*map(snapshot, actors))


@pytest.mark.parametrize("distributed", [False, True])
def test_a_gradient_waits_for_its_scale(one_rank, distributed):
    """A gradient that is multiplied after other forward passes gives the same bits as one that is multiplied at
    once."""
    at_once, waiting, other = build(distributed), build(distributed), batch_of(2)
    found = step(at_once, 1, scale=0.3)
    computed = waiting.backward(batch_of(1), made("sft").loss, counts(batch_of(1)))
    waiting.outputs(other, frozenset({"logprobs"}))
    assert waiting.apply(computed, learning_rate=1e-2, scale=0.3) == found
    assert torch.equal(snapshot(waiting), snapshot(at_once))
    unscaled = step(build(distributed), 1)
    assert (found["loss"], found["grad_norm"]) == pytest.approx((0.3 * unscaled["loss"], 0.3 * unscaled["grad_norm"]))


@pytest.mark.parametrize("distributed", [False, True])
def test_a_step_with_other_moments_leaves_ones_own_alone(one_rank, distributed):
    """After two steps with other moments and restored weights, the third step equals one without them. With shared
    moments it differs, so the test can fail."""
    results = {}
    for between in (None, "verification", "own"):
        actor = build(distributed)
        step(actor, 1)
        before = actor.snapshot()
        if between:
            step(actor, 2, between), step(actor, 3, between)
            with torch.no_grad():
                for p, value in zip((p for m in actor.models for p in m.parameters()), before, strict=True):
                    p.copy_(value)
            actor.optimizer.megatron.reload_model_params()
        step(actor, 4)
        results[between] = snapshot(actor)
    assert torch.equal(results["verification"], results[None])
    assert not torch.equal(results["own"], results[None])


def test_the_first_step_with_fresh_moments_is_corrected_for_bias(one_rank):
    """Adam's first step moves every weight by about the learning rate, because each set counts its own steps."""
    actor = build(False)
    for seed in range(5):
        step(actor, seed)
    before = snapshot(actor)
    step(actor, 9, "verification")
    moved = (snapshot(actor) - before).abs()
    assert moved[moved > 0].median().item() == pytest.approx(1e-2, rel=0.01)


def test_average_by_hand(one_rank):
    """Rate 1/4: from w0, after one update at w1, 3/4 w0 + 1/4 w1; the model then uses these weights."""
    actor = build(False)
    average, start = MovingAverage(actor, 0.25), snapshot(actor)
    step(actor, 1)
    average.update()
    mean = torch.cat([w.flatten() for w in average.weights])
    torch.testing.assert_close(mean, 0.75 * start + 0.25 * snapshot(actor))
    with actor.use_weights(average.weights):
        torch.testing.assert_close(snapshot(actor), mean)


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("used", [False, True])
def test_both_survive_a_checkpoint(one_rank, tmp_path, distributed, used):
    """Also moments that no step has used."""

    def go_on(actor: Actor, average: MovingAverage) -> list[torch.Tensor]:
        step(actor, 5, "verification"), step(actor, 6)
        average.update()
        return [snapshot(actor), *average.weights]

    actor = build(distributed)
    average = MovingAverage(actor, 0.25)
    step(actor, 1)
    if used:
        step(actor, 2, "verification"), step(actor, 3, "verification")
    average.update()
    writer = Checkpointer(tmp_path, {"actor": actor}, asynchronous=False, averages={"teacher": average})
    writer.save(1, {}, {})
    writer.close()
    expected = go_on(actor, average)

    other = build(distributed)
    mean = MovingAverage(other, 0.25)
    reader = Checkpointer(tmp_path, {"actor": other}, averages={"teacher": mean})
    reader.load(latest(tmp_path))
    reader.close()
    for found, wanted in zip(go_on(other, mean), expected, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("distributed", [False, True])
def test_a_checkpoint_of_the_other_optimizer_is_refused(one_rank, tmp_path, distributed):
    """megatron-core's error about it is no Exception."""
    writer = Checkpointer(tmp_path, {"actor": build(distributed)}, asynchronous=False)
    writer.save(1, {}, {})
    writer.close()
    reader = Checkpointer(tmp_path, {"actor": build(not distributed)})
    with pytest.raises(DataError, match="cannot be loaded into this model.*Was the model or the optimizer changed"):
        reader.load(latest(tmp_path))


class LayerWithExtraState(torch.nn.Linear):
    """Like Transformer Engine's layers: a weight and an empty state of FP8 scales."""

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        shards = make_sharded_tensors_for_checkpoint({"weight": self.weight}, prefix)
        empty = torch.empty(0, dtype=torch.uint8)
        return shards | {f"{prefix}_extra_state": ShardedObject(f"{prefix}_extra_state", empty, (1,), (0,))}


def test_an_average_leaves_extra_states_out(one_rank):
    layer = LayerWithExtraState(2, 2, bias=False)
    weights_of = SimpleNamespace(
        models=[layer], lora=None, snapshot=lambda: [layer.weight.detach().clone()], pinned=torch.clone
    )
    average = MovingAverage(weights_of, 0.5)
    found = average.sharded("teacher", {})["teacher.0"]
    assert found["teacher.weight"].data is average.weights[0]
    assert found["teacher._extra_state"].data.numel() == 0
