"""Who shares the frozen weights of a model with adapters: a critic does, and another reference does not."""

import json

import pytest
import torch
from transformers import Qwen3Config

from megatron_rft.config import Batching, Megatron, Model
from megatron_rft.config.lora import Lora
from megatron_rft.config.trainers import OnlineRecipe
from megatron_rft.megatron import weights
from megatron_rft.megatron.actor import Actor
from megatron_rft.objectives.base import counts
from megatron_rft.plan.layout import Layout
from megatron_rft.plan.memory import state_of
from megatron_rft.plan.model_shape import read_shape
from megatron_rft.records import Batch
from megatron_rft.training import adapters, build
from megatron_rft.utils.errors import DataError
from tests.made import made
from tests.parity.memory_cases import storages
from tests.shapes import SMALL

CONFIG = Qwen3Config(**SMALL, max_position_embeddings=64, architectures=["Qwen3ForCausalLM"])


def recipe_of(precision: str) -> OnlineRecipe:
    return OnlineRecipe(
        run={"output_dir": "out", "steps": 1},
        model={"path": "x", "initialise": "random", "precision": precision},
        data={"train": {"path": "examples/quickstart/arithmetic.py:rows"}},
        rollout={"group_size": 1},
        lora={"rank": 4},
        algorithm={"name": "ppo"},
        critic={"lr": 1e-2},
    )


def networks(recipe: OnlineRecipe) -> build.Networks:
    return build.Networks(CONFIG, recipe)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_critic_has_no_second_copy_of_the_frozen_weights(one_rank, tmp_path, precision):
    CONFIG.save_pretrained(tmp_path)
    recipe, layout, s = recipe_of(precision), Layout(1, 1, 1, 1, 1, 1), read_shape(tmp_path)
    actor = networks(recipe).actor(10, 1.0)
    critic = networks(recipe).critic(recipe.critic, 10, actor)
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


def test_a_critic_of_its_own_path_does_not_get_the_adapters_of_another_model(one_rank, tmp_path):
    """lora.path has adapters of model.path's model; the frozen models of both belong to a checkpoint."""
    made_for_policy, plain = networks(recipe_of("fp32")).actor(10, 1.0), Actor(CONFIG, Megatron(), Batching(), "fp32")
    for tensor in made_for_policy.tensors():
        tensor.data.normal_()
    CONFIG.save_pretrained(tmp_path / "x")
    model = Model(path=str(tmp_path / "x"), initialise="random", precision="fp32")
    adapters.export(made_for_policy, tmp_path / "adapters", model, 0)
    plain.load(weights.random_tensors(CONFIG, seed=7))
    weights.save_folder(plain.stream(), tmp_path / "critic", CONFIG)
    own = {"rank": 4, "path": str(tmp_path / "adapters")}
    recipe = recipe_of("fp32").model_copy(update={"model": model, "lora": Lora(**own)})
    options = recipe.critic.model_copy(update={"path": str(tmp_path / "critic")})
    actor = networks(recipe).actor(10, 1.0)
    assert all(map(torch.equal, actor.tensors(), made_for_policy.tensors()))
    critic = networks(recipe).critic(options, 10, actor)
    assert not any(tensor.any() for name, tensor in critic.stream(adapters=True) if "lora_B" in name)


@pytest.mark.parametrize("option", ["model.path", "critic.path"])
def test_a_checkpoint_of_adapters_belongs_to_both_frozen_models(tmp_path, option):
    saved = {"model.path": "a", "critic.path": "b", "data.train": "c"}
    (tmp_path / "run.json").write_text(json.dumps({"inputs": saved}))
    adapters.check_base(tmp_path, saved | {"data.train": "d"})
    adapters.check_base(tmp_path, {"model.path": "a"})
    other = f"^{option}: .* has adapters of another model than the one that is there now"
    with pytest.raises(DataError, match=rf"{other}\. Restore it, or change run.output_dir$"):
        adapters.check_base(tmp_path, saved | {option: "d"})


def test_the_reference_is_the_start_or_another_model_without_adapters(one_rank, tmp_path):
    """The start needs the adapters alone; model.reference is a whole model, in which they have no effect."""
    recipe = recipe_of("fp32")
    actor, other = networks(recipe).actor(10, 1.0), Actor(CONFIG, recipe.megatron, recipe.batching, "fp32")
    other.load(weights.random_tensors(CONFIG, seed=7))
    weights.save_folder(other.stream(), tmp_path, CONFIG)
    batch, names = Batch.of([[1, 2]] * 2, [[3, 4], [5]]), frozenset({"logprobs"})

    def logprobs(of: Actor) -> torch.Tensor:
        return of.outputs(batch, names)["logprobs"]

    start, expected = logprobs(actor), logprobs(other)
    own = build.reference_weights(recipe.model, 0, actor)
    for tensor in actor.tensors():
        tensor.data.normal_()
    moved = logprobs(actor)
    with actor.use_weights(own):
        assert torch.equal(logprobs(actor), start) and not torch.equal(moved, start)
    assert torch.equal(logprobs(actor), moved)
    named = build.reference_weights(recipe.model.model_copy(update={"reference": str(tmp_path)}), 0, actor)
    assert sum(map(torch.numel, own)) < sum(map(torch.numel, named)) / 2
    assert torch.equal(logprobs(actor), start)
    with actor.use_weights(named):
        assert torch.equal(logprobs(actor), expected)
    assert torch.equal(logprobs(actor), start)
