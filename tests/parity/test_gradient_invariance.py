"""The gradient of a mini-batch is the same (1e-5) for every split into micro-batches, packing and parallel layout, for
every objective. What an environment wrote (`masked`) changes nothing: on one rank the gradients with absurd values on
its tokens are the same bits. Layouts of several ranks get these values, and are compared with the gradients without."""

import json
from collections import defaultdict
from pathlib import Path

import pytest

from tests.parity.gradient_cases import LOSSES, MASKED
from tests.parity.launch import run_ranks

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("gradient_cases.py")
CASES = {  # world size -> layouts; those that write are what the others are compared with
    1: [
        "write=1,shared=0",
        "write=1,shared=0,starved=1",
        "shared=1",
        "starved=1",
        "shared=0,budget=40",
        "budget=64",
        "budget=40",
        "padded=1",
        "padded=1,budget=50",
        "recompute=1",
        "recompute=2",
        "shared=0,recompute=2",
        "skip=1",
        "write=1,shared=0,masked=1",
        "budget=40,padded=1,masked=1",
        "write=1,shared=0,moe=1",
        "moe=1",
        "write=1,shared=0,moe=1,masked=1",
        "write=1,shared=0,deep=1",
    ],
    2: [
        "dp=2",
        "dp=2,budget=40,masked=1",
        "dp=2,skip=1",
        "dp=2,starved=1",
        "tp=2,sp=1,masked=1",
        "cp=2,masked=1",
        "pp=2,budget=50,masked=1",
        "tp=2",
        "tp=2,sp=1,budget=60,padded=1",
        "pp=2",
        "pp=2,deep=1",
        "pp=2,vpp=2,budget=50,deep=1",
        "cp=2,padded=1",
        "moe=1,ep=2",
        "moe=1,ep=2,budget=50,masked=1",
    ],
    4: [
        "tp=2,pp=2,sp=1,skip=1",
        "cp=2,tp=2,sp=1",
        "pp=2,cp=2,budget=60,masked=1",
        "tp=2,pp=2,vpp=2,sp=1,budget=60,deep=1",
    ],
}


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, dict[str, dict]]:
    """layout -> loss -> difference from the reference."""
    reference, found = tmp_path_factory.mktemp("gradients") / "reference", defaultdict(dict)
    for ranks, cases in CASES.items():
        output = run_ranks(SCRIPT, ranks, reference, *cases)
        lines = [json.loads(line.removeprefix("RESULT ")) for line in output.splitlines() if line.startswith("RESULT ")]
        for line in lines:
            found[line["case"]][line["loss"]] = line
    return found


SURROGATE_ALONE = {"grpo, truncated weights", "dr_grpo", "gspo", "dapo, dynamic constraint", "cispo"}
WITH_ANOTHER_TERM = {"grpo", "grpo, exact KL", "dapo", "rloo", "reinforce_plus_plus", "ppo", "sdpo", "sft"}


def test_sequences_without_a_gradient_are_left_out(results):
    skipped = results["skip=1"]
    left_out = {loss for loss, found in skipped.items() if found.get("left_out")}
    assert left_out >= SURROGATE_ALONE and not left_out & WITH_ANOTHER_TERM
    assert skipped["gspo"]["left_out"] == 4
    assert not any(found.get("left_out") for found in results["shared=1"].values())


@pytest.mark.parametrize("case", [case for cases in CASES.values() for case in cases])
def test_gradient_does_not_depend_on_the_layout(results, case):
    assert results[case].keys() == {*LOSSES, *(MASKED if "masked" in case else ()), "ppo value", "outputs"}
    for loss, found in results[case].items():
        assert found["gradient"] < 1e-5 and found["metrics"] < 1e-5, (loss, found)
        if loss != "outputs":
            tensors = 2 + (4 if "deep" in case else 2) * (21 if "moe" in case else 11) + (loss == "ppo value")
            assert found["tensors"] == tensors and (found["size"] or "starved" in case), (loss, found)
