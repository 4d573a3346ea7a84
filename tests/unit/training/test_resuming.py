"""What a start refuses in a run's folder: run.resume must without a checkpoint, another model, fewer steps than were
done, log-probs of a reference with other adapters."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from examples.quickstart import arithmetic
from megatron_rft.config import Model
from megatron_rft.config.algorithms.offline import DPO
from megatron_rft.config.sections import Run
from megatron_rft.conversion.lora import TENSORS
from megatron_rft.training.offline import LOGPROBS_FILE, Reference, _kept_logprobs
from megatron_rft.training.run import TrainingRun
from megatron_rft.utils.errors import ConfigError, DataError


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
