"""The table of published steps of RL in docs/planning.md is the one that the plan's arithmetic gives."""

from pathlib import Path

from tools.fit_table import PEERS, STEPS, rows

PLANNING = Path(__file__).resolve().parents[3] / "docs/planning.md"


def test_the_documented_rows_are_those_of_the_arithmetic():
    text = PLANNING.read_text()
    assert sorted(STEPS) == sorted(path.stem for path in PEERS.glob("*.yaml"))
    assert [row for row in rows() if row not in text] == []
