"""A whole run of 16 ranks, TP 2 x PP 2 x DP 4, with an engine on each rank and sharded checkpoints: a job on four
virtual nodes. Where Slurm cannot run, it has 16 processes of this machine."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_rft.utils.checkpoint_files import damage, latest
from tests.integration.tiny import ROOT, metrics, train
from tests.slurm.cluster import tiny_keys

RECIPE = ROOT / "examples/pipo/qwen3_4b_base/grpo_pipo.yaml"
RUN = {
    "run__steps": 4,
    "reward__answer": "marked",
    "data__prompt_template": "null",
    "rollout__prompts_per_step": 16,
    "rollout__group_size": 4,
    "algorithm__mini_batch_prompts": 8,
    "pipo__learning_rate": 1e-2,
}
ONE_RANK = {"megatron__tensor_model_parallel_size": 1, "megatron__sequence_parallel": "false"}
LAYOUT = {"megatron__pipeline_model_parallel_size": 2}  # and the recipe's TP 2


@pytest.fixture
def run_16(request):
    """Trains on 16 ranks with these overrides. Returns success and what was printed."""

    def by_slurm(keys: list[str], log: Path) -> tuple[bool, str]:
        options = ["--nodes=4", "--gpus-per-node=4", "--time=60", f"--output={log}"]
        job = cluster.submit("launch/pipo_4b.sh", *options, *keys)
        ended, notes = job.wait(), job.folder / "start_0"
        return ended == "COMPLETED" and len(list(notes.glob("node_*.json"))) == 4, job.log

    def by_processes(keys: list[str], log: Path) -> tuple[bool, str]:
        status, output = train(RECIPE, "--nproc", "16", *keys)
        return status == 0, output

    try:
        cluster = request.getfixturevalue("cluster")
    except pytest.skip.Exception:
        return by_processes
    return by_slurm


@pytest.mark.slow
def test_16_ranks_do_what_one_rank_does(run_16, tmp_path):
    alone, many = tmp_path / "alone", tmp_path / "many"
    status, output = train(RECIPE, *tiny_keys(tmp_path, **RUN, **ONE_RANK, run__output_dir=alone))
    assert status == 0, output[-3000:]
    success, output = run_16(tiny_keys(tmp_path, **RUN, **LAYOUT, run__output_dir=many), tmp_path / "log")
    assert success, output[-6000:]
    assert "TP 2 x PP 2 x CP 1 x DP 4 = 16 ranks" in output
    newest = latest(many / "checkpoints")
    assert not damage(newest) and len(list(newest.glob("optimizer_*.safetensors"))) == 16
    lines, expected = metrics(many), metrics(alone)
    rewards = [line["reward/mean"] for line in expected]
    assert any(rewards) and [line["reward/mean"] for line in lines] == rewards
    assert any("verification/grad_norm" in line for line in lines)
    found, wanted = (load_file(run / "export/model.safetensors") for run in (many, alone))
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-4)
