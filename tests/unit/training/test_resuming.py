"""What a start refuses in a run's folder: run.resume must without a checkpoint, another model, fewer steps than were
done, log-probs of a reference with other adapters."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from examples.quickstart import arithmetic
from megatron_rft.config import Model, load
from megatron_rft.config.algorithms.offline import DPO
from megatron_rft.config.sections import Run
from megatron_rft.conversion.lora import TENSORS
from megatron_rft.launching.run_folder import claim_folder
from megatron_rft.training.offline import LOGPROBS_FILE, Reference, _kept_logprobs
from megatron_rft.training.run import TrainingRun
from megatron_rft.utils.errors import ConfigError, DataError


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


def test_log_probs_of_a_reference_with_other_adapters_are_not_used_again(one_rank, tmp_path):
    """An offline run keeps them in its folder; the reference is the model with the adapters of lora.path."""
    arithmetic.tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "start").mkdir()
    start, adapters = str(tmp_path / "start"), tmp_path / "start" / TENSORS
    here, kept = str(tmp_path), tmp_path / "start" / LOGPROBS_FILE

    def facts(reference: str | None = None) -> dict:
        model = Model(path=here, reference=reference)
        return Reference(model, Run(output_dir=here), DPO(), "data", start).facts

    adapters.write_bytes(b"adapters")
    first, named = facts(), facts(here)
    save_file({"logprobs": torch.ones(3)}, kept, metadata={"facts": json.dumps(first)})
    assert _kept_logprobs(kept, first).tolist() == [1, 1, 1]
    adapters.write_bytes(b"ADAPTERS")
    with pytest.raises(DataError, match="is of another lora.path, which has changed since this run's first start"):
        _kept_logprobs(kept, facts())
    assert facts(here) == named  # a model of its own has none
