"""The folder of a run, which one process claims."""

import pytest

from megatron_rft.config import load
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
    claim_folder(must)


def test_a_model_that_was_moved_can_be_linked(recipe, tmp_path):
    claim_folder(load(recipe, []))
    (tmp_path / "out/metrics.jsonl").write_text('{"step": 1}\n')
    for option, told in ((f"model.path={tmp_path}/moved", True), ("run.seed=1", False)):
        with pytest.raises(ConfigError, match="or undo these changes to resume it") as refused:
            claim_folder(load(recipe, [option]))
        assert ("for what was only moved, make a link at its old path" in str(refused.value)) == told
