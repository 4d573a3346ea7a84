"""tools/house.py counts what one training step touches."""

import os
import re
import subprocess
import sys

import pytest

from tests.fork_server import ENVIRONMENT
from tests.integration.tiny import ROOT


@pytest.mark.slow
def test_it_traces_a_step_and_counts():
    cold, warm = traced(), traced("--warm")
    assert "equivalence/reader.py" in cold[1], cold[1]
    assert warm[0] < cold[0], "fewer answers, or none, are read as formulas"


def traced(*options: str) -> tuple[int, str]:
    """The lines of the functions of a step, and what the tool says."""
    done = subprocess.run(
        [sys.executable, ROOT / "tools/house.py", "--list", *options],
        env=os.environ | ENVIRONMENT,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    files, lines = map(int, re.search(r"touches +(\d+) files (\d+) lines", done.stdout.replace(",", "")).groups())
    assert 30 < files < 90 and 1500 < lines < 5000, done.stdout
    for path in ("megatron/actor.py", "objectives/plugins/pipo.py", "inference/hf/decoder.py"):
        assert f"megatron_rft/{path}" in done.stdout, path  # the generation, in its thread or not, and the verification
    assert "outside of config and plan" in done.stdout and "class names twice" in done.stdout
    return lines, done.stdout
