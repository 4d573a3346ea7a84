"""Starts a real Slurm of four virtual nodes with simulated GPUs for the tests of this folder, which are skipped without
Slurm."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.slurm.cluster import TOOLS, Cluster, free_ports


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    os.environ["PATH"] += ":/usr/sbin:/sbin"  # where Debian puts daemons, which not every shell's PATH has
    if os.getuid() != 0:
        pytest.skip("a Slurm of several nodes on one machine takes root")
    missing = [name for name in ("slurmctld", "slurmd", "munged", "gcc") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"no {', '.join(missing)} here: tools/one_machine_slurm/install.sh installs them (Debian, Ubuntu)")
    folder = tmp_path_factory.mktemp("slurm")
    for above in folder.parents:  # munge's clients look for its socket under it
        if above.stat().st_mode & 0o005 != 0o005 and above.is_relative_to("/tmp") and above != Path("/tmp"):
            above.chmod(0o755)
    try:
        up = [TOOLS / "up.sh", folder, "4", str(free_ports(5))]
        done = subprocess.run(up, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=900)
        if done.returncode:
            pytest.skip(f"Slurm did not come up: {done.stderr[-500:]}")
        yield Cluster(folder)
    finally:
        subprocess.run([TOOLS / "down.sh", folder], timeout=900, check=True)
