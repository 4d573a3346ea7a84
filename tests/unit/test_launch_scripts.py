"""The scripts in launch/ on the login node, with a stand-in for sbatch and python; tests/slurm has the real one."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "options, ranks",
    [
        (["--nodes=2", "--gpus-per-node=8"], 16),
        (["--nodes", "2", "--gpus-per-node", "h100:4"], 8),
        (["-N2", "--gres=gpu:4"], 8),
        (["-N", "3", "--gres=gpu:h100:2"], 6),
        (["--gpus-per-node=8"], 8),
    ],
)
def test_the_plan_is_for_as_many_ranks_as_are_asked_for(tmp_path, options, ranks):
    for name in ("sbatch", "python"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@"\n')
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SBATCH_ACCOUNT": "me",
        "SBATCH_PARTITION": "gpu",
        "LAUNCH_SETUP": ":",
    }
    command = ["bash", "launch/pipo_8b.sh", *options, "run.seed=1"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert f"--nproc {ranks} run.seed=1" in next(line for line in lines if " plan " in line)
    assert lines[-1].startswith(f"sbatch {' '.join(options)} ") and lines[-1].endswith("pipo_8b.sh run.seed=1")
