"""A whole run of 16 ranks on this machine: TP 2 x PP 2 x DP 4, with an engine on each rank and sharded checkpoints."""

import pytest
import torch
from safetensors.torch import load_file

from megatron_rft.utils.checkpoint_files import damage, latest
from tests.integration.tiny import metrics, train, write_recipe

LAYOUT = (
    "megatron.tensor_model_parallel_size=2",
    "megatron.pipeline_model_parallel_size=2",
    "megatron.sequence_parallel=true",
    "checkpoint.gather_gib=0",
)


@pytest.mark.slow
def test_16_ranks_do_what_one_rank_does(tmp_path):
    recipe = write_recipe(
        tmp_path,
        run={"steps": 4},
        rollout={"prompts_per_step": 16, "group_size": 4},
        pipo={"window": 2, "learning_rate": 1e-2},
        algorithm={"mini_batch_prompts": 8},
        optimizer={"lr": 1e-2, "use_distributed_optimizer": True},
    )
    alone, many = tmp_path / "run", tmp_path / "many"
    for arguments in ((), ("--nproc", "16", f"run.output_dir={many}", *LAYOUT)):
        status, output = train(recipe, *arguments)
        assert status == 0, output[-3000:]
    newest = latest(many / "checkpoints")
    assert not damage(newest) and len(list(newest.glob("optimizer_*.safetensors"))) == 16
    lines, expected = metrics(many), metrics(alone)
    assert [line.get("reward/mean") for line in lines] == [line.get("reward/mean") for line in expected]
    assert any("verification/grad_norm" in line for line in lines)
    found, wanted = (load_file(run / "export/model.safetensors") for run in (many, alone))
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-4)
