"""The gradient of every offline objective is the same for every split and layout, with a recomputed and with a cached
reference."""

import json
from pathlib import Path

import pytest

from tests.parity.launch import run_ranks
from tests.parity.offline_cases import OBJECTIVES

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("offline_cases.py")
CASES = {  # world size -> layouts; the first of all writes the reference
    1: [
        "write=1,shared=0",
        "shared=1,recorded=1",
        "shared=0,budget=64",
        "budget=64",
        "padded=1,budget=70,recorded=1",
        "write=1,shared=0,masked=1",
        "masked=1,recorded=1",
    ],
    2: [
        "dp=2",
        "dp=2,budget=64,recorded=1",
        "tp=2,sp=1",
        "tp=2,recorded=1",
        "pp=2,budget=64",
        "pp=2,recorded=1",
        "cp=2",
        "tp=2,sp=1,masked=1,recorded=1",
    ],
    4: ["tp=2,pp=2,sp=1,recorded=1"],
}


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[tuple[str, str], dict]:
    reference, found = tmp_path_factory.mktemp("gradients") / "reference.pt", {}
    for ranks, cases in CASES.items():
        output = run_ranks(SCRIPT, ranks, reference, *cases)
        lines = [json.loads(line.removeprefix("RESULT ")) for line in output.splitlines() if line.startswith("RESULT ")]
        found |= {(line["case"], line["objective"]): line for line in lines}
    return found


@pytest.mark.parametrize("case", [case for cases in CASES.values() for case in cases])
def test_gradients_do_not_depend_on_the_layout(results, case):
    for name in OBJECTIVES:
        assert results[case, name]["gradient"] < 1e-5, name
        assert results[case, name]["metrics"] < 1e-4, name
