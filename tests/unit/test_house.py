"""tools/house.py counts what one training step touches."""

import os
import re
import subprocess
import sys

import pytest

from tests.fork_server import ENVIRONMENT, Forked
from tests.integration.tiny import ROOT


@pytest.mark.slow
def test_it_traces_a_step_and_counts():
    cold, warm = traced(), traced("--warm")
    assert "equivalence/reader.py" in cold[1], cold[1]
    assert warm[0] < cold[0], "fewer answers, or none, are read as formulas"


def traced(*options: str) -> tuple[int, str]:
    """The lines of the functions of a step, and what the tool says."""
    process = Forked(
        [sys.executable, str(ROOT / "tools/house.py"), "--list", *options],
        env=os.environ | ENVIRONMENT,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    output, errors = process.communicate()
    assert process.returncode == 0, errors[-3000:]
    files, lines = map(int, re.search(r"touches +(\d+) files (\d+) lines", output.replace(",", "")).groups())
    assert 30 < files < 90 and 1500 < lines < 5000, output
    for path in ("megatron/actor.py", "objectives/plugins/pipo.py", "inference/hf/decoder.py"):
        assert f"megatron_rft/{path}" in output, path  # the generation, in its thread or not, and the verification
    assert "outside of config and plan" in output and "class names twice" in output
    return lines, output
