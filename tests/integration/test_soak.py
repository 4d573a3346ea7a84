"""The short form of tools/soak.py: all that it does to a run, in the tiny recipe on two ranks."""

import pytest

from tests.integration.tiny import write_recipe
from tools.soak import EVENTS, Soak, differences

EVERY, STEPS = 4, 40


@pytest.mark.slow
def test_a_run_survives_all_of_it_and_leaves_nothing_behind(tmp_path):
    recipe = write_recipe(tmp_path, run={"steps": STEPS}, pipo={"window": 2, "learning_rate": 1e-2})
    soak = Soak(recipe, [], tmp_path / "soak", forked=True)
    calm, rough = tmp_path / "calm", tmp_path / "rough"
    assert soak.undisturbed(calm)
    told = soak.disturbed(rough, EVERY, len(EVENTS))
    assert len(told) >= len(EVENTS) // 2, told
    assert not differences(calm, rough), told
    assert not (left := soak.left(seconds=600)), (left, told)
