"""A critic with adapters of its own computes with the policy's frozen weights: one copy is in memory, as planned."""

import pytest
import torch
from transformers import Qwen3Config

from megatron_rft.config import Megatron
from megatron_rft.config.trainers import OnlineRecipe
from megatron_rft.megatron import parallel, weights
from megatron_rft.objectives.base import counts
from megatron_rft.plan.layout import Layout
from megatron_rft.plan.memory import state_of
from megatron_rft.plan.parameters import Sizes
from megatron_rft.records import Batch
from megatron_rft.training import build
from tests.made import made
from tests.parity.memory_cases import storages
from tests.shapes import SMALL


@pytest.fixture
def one_rank():
    parallel.initialize(Megatron())
    yield
    parallel.destroy_layout()


def recipe_of(precision: str) -> OnlineRecipe:
    return OnlineRecipe(
        run={"output_dir": "out", "steps": 1},
        model={"path": "x", "initialise": "random", "precision": precision},
        data={"train": {"path": "arithmetic"}},
        rollout={"group_size": 1},
        lora={"rank": 4},
        algorithm={"name": "ppo"},
        critic={"lr": 1e-2},
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_critic_has_no_second_copy_of_the_frozen_weights(one_rank, tmp_path, precision):
    config = Qwen3Config(**SMALL, max_position_embeddings=64, architectures=["Qwen3ForCausalLM"])
    config.save_pretrained(tmp_path)
    recipe, layout, s = recipe_of(precision), Layout(1, 1, 1, 1, 1, 1), Sizes.read(tmp_path)
    actor = build.build_actor(recipe, config, 10)
    critic = build.build_critic(recipe, config, 10, actor)
    planned = [state_of(recipe, s, layout, 0, value_head).weights for value_head in (False, True)]

    def in_memory() -> int:
        return storages([*actor.tensors(frozen=True), *critic.tensors(frozen=True)])

    assert in_memory() == sum(planned) and planned[1] < planned[0] / 2
    base = {name: tensor.clone() for name, tensor in weights.named_tensors(actor.models)}
    trained = critic.snapshot()
    given = {"values": torch.zeros(3), "returns": torch.ones(3)}
    batch = Batch.of([[1, 2]] * 2, [[3, 4], [5]], tokens=given)
    critic.step(batch, made("ppo").value_loss, counts(batch), frozenset({"values"}), learning_rate=1e-2)
    assert in_memory() == sum(planned)
    assert all(torch.equal(base[name], tensor) for name, tensor in weights.named_tensors(actor.models))
    assert not all(torch.equal(a, b) for a, b in zip(trained, critic.snapshot(), strict=True))
