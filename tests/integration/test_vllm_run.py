"""A run with vLLM and a learning rate of 0: engine and trainer must agree at every step."""

import json

import pytest

from megatron_rft.plan.vllm import unusable
from tests.integration.tiny import metrics, train, write_recipe


@pytest.mark.skipif(unusable() is not None, reason=str(unusable()))
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=[pytest.mark.slow, pytest.mark.alone])])
def test_trainer_and_engine_agree_on_sampled_tokens(tmp_path, workers):
    """The trainer's log-probs of the engine's tokens equal the engine's, temperature included, and the policy stays the
    reference. Two ranks split the model and have one engine each, or one together."""
    recipe = write_recipe(
        tmp_path,
        run={"steps": 3},
        optimizer={"lr": 1e-30},
        rollout={"engine": "vllm", "temperature": 0.7, "max_response_tokens": 6},
        faults={"on_mismatch": "stop", "compare_weights_every": 1},
        megatron={"tensor_model_parallel_size": 2},
        vllm={"tensor_parallel_size": workers},
    )
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"head_dim": 32}))
    status, output = train(recipe, "--nproc", "2")
    assert status == 0, output
    assert "engine: vllm" in output
    lines = [line for line in metrics(tmp_path / "run") if "mismatch/max" in line]
    assert len(lines) == 3
    for line in lines:
        assert line["mismatch/max"] < 1e-4 and line["mismatch/share"] == 0 and abs(line["mismatch/kl"]) < 1e-8
        assert abs(line["policy/kl"]) < 1e-6 and line["sync/tensors"] > 20
