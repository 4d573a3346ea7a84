"""The planned memory of every shipped recipe is within 10% of the rehearsed memory, at the full depth of its model.

A rehearsal of all layers would take a minute for each recipe. The peak of an update is affine in the number of layers,
so it is rehearsed with two and with four layers of full size, on the recipe's nodes, and continued to all. One test
rehearses all layers to show that this holds. Of recipes with the same layout, sizes and kind of loss one is rehearsed
(`tools/plan_table.py`, which also makes the table of docs/planning.md), with a pipeline its first stage; further stages
are in test_rehearse.py.
"""

import pytest

from megatron_rft.commands.rehearse import Worker
from tests.unit.plan.test_shipped_recipes import ROOT, name
from tools.plan_table import at_full_depth, kinds


@pytest.fixture(scope="module")
def worker():
    with Worker() as shared:
        yield shared


@pytest.mark.slow
@pytest.mark.parametrize("path", [paths[0] for paths in kinds().values()], ids=name)
def test_the_plan_is_within_a_tenth(worker, path):
    planned, rehearsed = at_full_depth(worker, path)
    assert planned == pytest.approx(rehearsed, rel=0.1)


@pytest.mark.slow
def test_the_peak_is_affine_in_the_layers(worker):
    path = ROOT / "examples/dynamic/apps_dapo/agreeing.yaml"
    (planned, continued), (whole_plan, whole) = (at_full_depth(worker, path, whole) for whole in (False, True))
    assert planned == pytest.approx(whole_plan, rel=0.001)
    assert continued == pytest.approx(whole, rel=0.01)
