"""rollout.offload_trainer: the trainer's state leaves while the engine is awake, and the training stays the same."""

import pytest
from safetensors.torch import load_file

from tests.integration.tiny import metrics, train, write_recipe

SECTIONS = dict(
    run={"steps": 4, "seed": 3},
    model={"precision": "bf16", "initialise": "random"},
    algorithm={"name": "ppo", "kl_coefficient": 0.01, "mini_batch_prompts": 2},
    critic={"lr": 1e-2},
    pipo={"window": 2, "learning_rate": 1e-2, "optimizer_state": "own"},
)
CLOCK = ("second", "time", "memory/", "mfu")  # in the names of what no two runs have in common


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(weights, log) of a run with offloading and of one without: PPO and PIPO with own moments, two checkpoints."""
    found = []
    for offload in (False, True):
        folder = tmp_path_factory.mktemp("offload")
        rollout = {"prompts_per_step": 4, "group_size": 8, "max_response_tokens": 2, "offload_trainer": offload}
        status, output = train(write_recipe(folder, rollout=rollout, **SECTIONS))
        assert status == 0, output
        found.append((load_file(folder / "run/export/model.safetensors"), metrics(folder / "run")))
    return found


def test_the_training_is_the_same_bit_for_bit(runs):
    (weights, log), (offloaded, other_log) = runs
    assert weights.keys() == offloaded.keys()
    assert all(weights[name].equal(offloaded[name]) for name in weights)
    assert len(log) == len(other_log) > 4
    for line, other in zip(log, other_log, strict=True):
        same = {name: value for name, value in line.items() if not any(word in name for word in CLOCK)}
        assert len(same) > 10 or line["step"] == 0
        assert same == {name: other[name] for name in same}
