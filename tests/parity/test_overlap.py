"""Overlapped communication and a gradient that waits for its scale, on two data-parallel ranks."""

from pathlib import Path

from tests.parity.launch import run_ranks


def test_overlap_and_a_waiting_gradient_give_the_same_bits():
    output = run_ranks(Path(__file__).with_name("overlap_cases.py"), 2)
    assert output.count("the same bits") == 2, output[-3000:]
