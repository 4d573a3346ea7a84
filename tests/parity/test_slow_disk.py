"""Ranks wait for the one that writes longer than a step may take."""

from pathlib import Path

import pytest

from megatron_rft.utils.checkpoint_files import latest
from tests.parity.launch import run_ranks


@pytest.mark.slow
def test_a_checkpoint_and_an_export_may_take_longer_than_a_step(tmp_path):
    output = run_ranks(Path(__file__).with_name("slow_disk_cases.py"), 2, tmp_path)
    assert output.count("done") == 2, output[-3000:]
    assert latest(tmp_path / "checkpoints").name == "step_000001"
    assert (tmp_path / "export" / "model.safetensors").is_file()
