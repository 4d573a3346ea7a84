"""The gradient of a mini-batch is the same for every cut into micro-batches, packing and parallel layout (1e-5)."""

import json
from pathlib import Path

import pytest

from tests.parity.launch import torchrun

SCRIPT = Path(__file__).with_name("gradient_cases.py")
CASES = {  # world size -> layouts; the first of all writes the reference
    1: ["write=1", "budget=64", "budget=40", "padded=1", "padded=1,budget=50", "recompute=1"],
    2: [
        "dp=2",
        "dp=2,budget=40",
        "tp=2",
        "tp=2,sp=1",
        "tp=2,sp=1,budget=60,padded=1",
        "pp=2",
        "pp=2,budget=50",
        "pp=2,vpp=2,budget=50",
        "cp=2",
        "cp=2,padded=1",
    ],
    4: ["tp=2,pp=2,sp=1", "cp=2,tp=2,sp=1", "pp=2,cp=2,budget=60", "tp=2,pp=2,vpp=2,sp=1,budget=60"],
}


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, dict]:
    reference, found = tmp_path_factory.mktemp("gradients") / "reference.pt", {}
    for ranks, cases in CASES.items():
        output = torchrun(SCRIPT, ranks, reference, *cases, timeout=300)
        lines = [json.loads(line.removeprefix("RESULT ")) for line in output.splitlines() if line.startswith("RESULT ")]
        found |= {line["case"]: line for line in lines}
    return found


@pytest.mark.parametrize("case", [case for cases in CASES.values() for case in cases])
def test_gradient_does_not_depend_on_the_layout(results, case):
    assert results[case]["tensors"] == 46
    assert results[case]["gradient"] < 1e-5
    assert results[case]["metrics"] < 1e-5
