"""`plan` states exactly the bytes that weights, gradients and optimizer of real actors take."""

from pathlib import Path

from tests.parity.launch import run_ranks

CASES = 2 * 2 * 5 * 5 + 2 * 5  # families x tied or not x layouts x options, and those of experts
CASES += 2 * 5 * 3 * 2  # families, layouts, options, and a trained tower or adapters of it


def test_announced_bytes_are_those_of_a_built_actor(tmp_path):
    output = run_ranks(Path(__file__).with_name("memory_cases.py"), 4, tmp_path)
    cases = [line.split("\t")[1:] for line in output.splitlines() if line.startswith("CASE\t")]
    assert len(cases) == CASES, output[-3000:]
    wrong = [case for case in cases if case[-1] != "[]"]
    assert not wrong, f"(announced, built) differ: {wrong}"
