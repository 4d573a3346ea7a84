"""Router replay: where experts flip between engine and trainer, replay leaves only rounding, in every layout."""

from pathlib import Path

import pytest

from tests.parity.launch import run_ranks
from tests.parity.route_cases import FAMILIES, LAYOUTS, possible


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Has the log-probs and gradients of the first layout of one rank, once its test has run."""
    return tmp_path_factory.mktemp("routes")


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_engines_experts_are_those_of_the_trainer(ranks, folder):
    output = run_ranks(Path(__file__).with_name("route_cases.py"), ranks, folder, *FAMILIES)
    cases = [line.split("\t")[1:] for line in output.splitlines() if line.startswith("CASE\t")]
    assert len(cases) == sum(possible(c, case) for c in FAMILIES.values() for case in LAYOUTS[ranks]), output[-3000:]
    for case in cases:
        own, replayed, far = map(float, case[-4:-1])
        assert own > 1e-3, f"no experts flip: {case}"
        assert replayed < 1e-10 and far < 1e-4 and case[-1] == "True", case
