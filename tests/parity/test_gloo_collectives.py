"""The collectives of the distributed optimizer on gloo give what torch's give."""

from pathlib import Path

from tests.parity.launch import run_ranks


def test_sums_and_gathered_weights_are_torchs():
    output = run_ranks(Path(__file__).with_name("collective_cases.py"), 3)
    assert output.count("SAME") == 3, output[-3000:]
