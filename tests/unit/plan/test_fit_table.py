"""The table of published steps in docs/planning.md is the one that the plan's arithmetic gives."""

from pathlib import Path

import pytest

from tools.fit_table import PEERS, STEPS, all_predicted, fitted, rows
from tools.tail import REACHED

PLANNING = Path(__file__).resolve().parents[3] / "docs/planning.md"


@pytest.fixture(scope="module")
def steps():
    return all_predicted()


def test_the_documented_rows_are_those_of_the_arithmetic(steps):
    text = PLANNING.read_text()
    assert sorted(STEPS) == sorted(path.stem for path in PEERS.glob("*.yaml"))
    assert [row for row in rows(steps) if row not in text] == []


def test_what_is_fitted_to_half_of_the_steps_of_rl_holds_for_the_others(steps):
    assert fitted(steps) == REACHED
    test = {name: each for name, each in steps.items() if STEPS[name].row == "test"}
    assert len(test) == 3
    for name, (_, generation, rest) in test.items():
        assert abs((generation + rest) / STEPS[name].seconds - 1) < 0.25, name
