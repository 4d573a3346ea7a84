"""What a start refuses in a run's folder: run.resume must without a checkpoint, and fewer steps than were done."""

from types import SimpleNamespace

import pytest

from megatron_rft.config import load
from megatron_rft.training.run import TrainingRun
from megatron_rft.launching.run_folder import claim_folder
from megatron_rft.utils.errors import ConfigError


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"run: {{output_dir: {tmp_path}/out, steps: 10}}\nmodel: {{path: {tmp_path}/model}}\n"
        "data: {train: examples/quickstart/arithmetic.py:rows}\n"
    )
    return path


def test_must_refuses_to_start_again(recipe, tmp_path):
    """Without a checkpoint a start begins with step 1, and replaces what metrics.jsonl has."""
    must = load(recipe, ["run.resume=must"])
    with pytest.raises(ConfigError, match="run.resume is 'must', and there is nothing to resume in"):
        claim_folder(must)
    claim_folder(load(recipe, []))
    (tmp_path / "out/metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match="run.resume is 'must', and there is nothing to resume in"):
        claim_folder(must)
    (tmp_path / "out/checkpoints/step_000001").mkdir(parents=True)
    assert claim_folder(must) == tmp_path / "out"


@pytest.mark.parametrize("option", ["steps", "epochs"])
def test_a_run_is_not_resumed_with_fewer_steps_than_it_has_done(tmp_path, option):
    """It would test and export the model of step 40 as that of step 20."""
    facts = {"step": 40, "position": 80, "skipped_steps": []}
    run = SimpleNamespace(
        checkpoints=SimpleNamespace(newest_intact=lambda: (tmp_path, []), load=lambda path: (facts, {})),
        models=SimpleNamespace(actor=SimpleNamespace(lora=None)),
        recipe=SimpleNamespace(run=SimpleNamespace(steps=20 if option == "steps" else None)),
        stream=SimpleNamespace(),
        guard=SimpleNamespace(),
        folder=tmp_path,
        total_steps=20,
    )
    with pytest.raises(
        ConfigError, match=f"^run.{option}: the run in {tmp_path} has done 40 steps, more than these 20"
    ):
        TrainingRun.restore(run, {})
