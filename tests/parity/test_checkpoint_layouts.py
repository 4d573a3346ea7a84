"""Checkpoints of every family in every layout, against megatron-core's own reader and writer: equal in every bit."""

from pathlib import Path

import pytest

from tests.families import FAMILIES, SEEING
from tests.parity.launch import run_ranks

# families x tied or not x layouts, one each with virtual stages and with experts, and one layout of each other family
CASES = 4 * 2 * 4 + 2 * 1 + 2 * 2 + len(FAMILIES | SEEING)


@pytest.mark.slow
def test_any_layout_reads_what_is_written_and_writes_what_is_read(tmp_path):
    output = run_ranks(Path(__file__).with_name("checkpoint_cases.py"), 4, tmp_path)
    cases = [line.split("\t")[1:] for line in output.splitlines() if line.startswith("CASE\t")]
    assert len(cases) == CASES, output[-3000:]
    wrong = [case for case in cases if case[3:] != ["0", "0"]]
    assert not wrong, f"tensors differ: {wrong}"
