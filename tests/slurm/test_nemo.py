"""launch/nemo.py with real NeMo-Run: on a real Slurm, with and without a container, and on this machine.

NeMo-Run has an environment of its own, .venv-nemo (tests/run.sh makes it) or $NEMO_PYTHON; without it this is skipped.
"""

import os
import sys
import time
from pathlib import Path

import pytest

from tests.integration.tiny import metrics
from tests.slurm.cluster import ROOT, SlurmJob, tiny_keys

RECIPE = "examples/pipo/qwen3_4b_base/grpo_pipo.yaml"
LAYOUT = {"megatron__tensor_model_parallel_size": 1, "megatron__sequence_parallel": "false"}


@pytest.fixture(scope="module")
def nemo():
    python = Path(os.environ.get("NEMO_PYTHON", ROOT / ".venv-nemo" / "bin" / "python"))
    if not python.exists():
        pytest.skip(f"no NeMo-Run: {python} is not there (pip install -r launch/nemo.lock)")
    return [python, ROOT / "launch" / "nemo.py", RECIPE]


@pytest.fixture
def slurm(tmp_path):
    """Where and as whom, and the run's own Python on every node."""
    found = ["--account", "tests", "--partition", "batch", "--workspace", tmp_path / "shared", "--time", "01:00:00"]
    return [*found, "--setup", f"export PATH={Path(sys.executable).parent}:$PATH"]


def test_a_dry_run_prints_the_scripts_and_submits_nothing(cluster, nemo, slurm):
    status, output = cluster.run(*nemo, *slurm, "--gpus-per-node", 8, "--sweep", "run.seed=1,2", "--dry-run")
    assert status == 0, output
    for line in ("#SBATCH --account=tests", "#SBATCH --gpus-per-node=8", "#SBATCH --signal=B:USR1@600"):
        assert output.count(line) == 2
    for seed in (1, 2):
        keys = f"run.seed={seed} run.output_dir=runs/pipo/qwen3_4b_base/grpo_pipo/seed_{seed}"
        assert f"exec python -m megatron_rft train {RECIPE} --nproc 8 {keys} --job" in output
    assert cluster.run("squeue", "-h")[1] == ""


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--account", ""], "no account: --account"),
        (["--partition", ""], "no partition: --partition"),
        (["--workspace", "/proc/me"], "--workspace /proc/me cannot be written"),
        (["--workspace", "here"], "--workspace here: give the whole path"),
        (["--sweep", "run.seed"], "--sweep run.seed: write section.option=A,B,C"),
        (["rum.steps=3"], "grpo_pipo: the command line: rum: "),
    ],
)
def test_mistakes_are_answered_before_the_queue(cluster, nemo, slurm, arguments, words):
    status, output = cluster.run(*nemo, *slurm, "--nproc", 8, *arguments)
    assert status == 2 and output.startswith(f"error: {words}") and len(output.splitlines()) == 1, output
    assert cluster.run("squeue", "-h")[1] == ""


def test_an_unknown_recipe(cluster, nemo):
    status, output = cluster.run(*nemo[:2], "examples/nothing.yaml", "--local")
    assert (status, output) == (2, "error: there is no recipe examples/nothing.yaml\n")


def test_two_nodes_without_a_container_told_to_stop_on_the_way(cluster, nemo, slurm, tmp_path):
    """The script that NeMo-Run generates puts the job back into the queue as those in launch/ do."""
    keys = tiny_keys(tmp_path, run__steps=20, run__output_dir=tmp_path / "run", **LAYOUT)
    process = cluster.start(*nemo, *slurm, "--nodes", 2, "--nproc", 1, *keys)
    try:
        job = submitted(cluster, tmp_path / "shared")
        log = tmp_path / "run/metrics.jsonl"
        job.wait_for(lambda: log.exists() and log.read_text().count("\n") >= 2, "step 2")
        job.pause()
        job.change("TimeLimit=9")
        job.wait_for(lambda: job.told_to_stop(0), "word of the time limit")
        job.go_on()
        job.wait_for(lambda: job.shown("Restarts") == "1", "requeue")
        job.change("TimeLimit=60")
        assert job.wait() == "COMPLETED"
        output, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0 and "grpo_pipo: SUCCEEDED" in output, output[-3000:]
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, 21))
    assert len(list(job.folder.glob("start_*"))) == 2


def submitted(cluster, workspace: Path) -> SlurmJob:
    """The one job in the queue. NeMo-Run's imports alone take 5 to 15 seconds before it submits."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        _, output = cluster.run("squeue", "-h", "-o", "%A")
        if output.strip():
            return SlurmJob(cluster, int(output), workspace / "slurm" / output.strip())
        time.sleep(0.2)
    raise AssertionError("no job was submitted")


def test_a_failed_job_in_a_container_is_a_failure(cluster, nemo, slurm, tmp_path):
    """Of two points one fails in its job. Both see the workspace, mounted, and write their runs there."""
    image = tmp_path / "image.sqsh"
    image.touch()
    setup = slurm[-1] + "\ncase $SLURM_JOB_NAME in *seed_2*) exit 7 ;; esac"
    keys = [key for key in tiny_keys(tmp_path, run__steps=2, **LAYOUT) if not key.startswith("run.output_dir")]
    command = [*nemo, *slurm[:-1], setup, "--nproc", 1, "--image", image, "--sweep", "run.seed=1,2", *keys]
    status, output = cluster.run(*command, timeout=240)
    assert status == 1, output[-3000:]
    assert "grpo_pipo-seed_1: SUCCEEDED" in output and "grpo_pipo-seed_2: FAILED" in output
    assert "1 of 2 jobs did not succeed: grpo_pipo-seed_2" in output
    runs = tmp_path / "shared/runs/pipo/qwen3_4b_base/grpo_pipo"
    assert (runs / "seed_1/export/model.safetensors").exists() and not (runs / "seed_2").exists()


def test_on_this_machine(cluster, nemo, tmp_path):
    keys = tiny_keys(tmp_path, run__steps=2, **LAYOUT)
    setup = f"export PATH={Path(sys.executable).parent}:$PATH"
    command = [*nemo, "--local", "--nproc", 1, "--setup", setup, *keys]
    status, output = cluster.run(*command, timeout=240, NEMORUN_HOME=str(tmp_path / "nemo"))
    assert status == 0 and "grpo_pipo: SUCCEEDED" in output, output[-3000:]
    assert (tmp_path / "run/export/model.safetensors").exists()
    status, output = cluster.run(*command[:-1], "--setup", "exit 5", timeout=240, NEMORUN_HOME=str(tmp_path / "nemo"))
    assert status == 1 and "grpo_pipo: FAILED" in output
