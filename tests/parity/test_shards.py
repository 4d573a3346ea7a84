"""Checkpoints whose optimizer state each rank writes for itself."""

from pathlib import Path

from tests.parity.launch import run_ranks
from tests.parity.shards_cases import LAYOUTS


def test_they_are_read_in_every_layout_as_if_they_had_been_gathered(tmp_path):
    output = run_ranks(Path(__file__).with_name("shards_cases.py"), 4, tmp_path)
    cases = [line.split("\t")[1:] for line in output.splitlines() if line.startswith("CASE\t")]
    assert len(cases) == sum(map(len, LAYOUTS.values())), output[-3000:]
    for _family, _layout, compared, wrong, share in cases:
        assert int(compared) > 100 and int(wrong) == 0, cases
        assert float(share) < 0.4, "one rank writes much more than the others"
