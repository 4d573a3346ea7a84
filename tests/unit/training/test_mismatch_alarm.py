import pytest

from megatron_rft.config import Faults
from megatron_rft.training.mismatch_alarm import check, check_bounds
from megatron_rft.utils.errors import ConfigError, RunFailed
from tests.made import made

GOOD = {"mismatch/kl": 1e-4, "mismatch/share": 0.02, "mismatch/max": 3.0}


def test_within_the_bounds_or_without_numbers():
    assert check(GOOD, Faults(), 3) is None and check({}, Faults(), 3) is None


@pytest.mark.parametrize("name, value, bound", [("kl", 0.2, 0.05), ("share", 0.5, 0.25), ("kl", float("nan"), 0.05)])
def test_an_alarm_is_told_or_ends_the_run(name, value, bound):
    metrics = GOOD | {f"mismatch/{name}": value}
    told = f"step 3: .*mismatch/{name} {value:.3g} is above faults.mismatch_{name}, {bound:g}\\. Causes"
    with pytest.raises(RunFailed, match=told):
        check(metrics, Faults(on_mismatch="stop"), 3)
    assert check(metrics, Faults(), 3).startswith("step 3: engine and trainer disagree")
    assert check(metrics, Faults(**{f"mismatch_{name}": None}), 3) is None


def test_the_largest_difference_has_no_bound_by_itself():
    assert "mismatch/max 3 is above faults.mismatch_max, 1" in check(GOOD, Faults(mismatch_max=1.0), 3)


def test_a_bound_on_what_is_not_computed_is_refused():
    one, several = made("grpo"), made("grpo", epochs=2)
    check_bounds(Faults(mismatch_max=1.0), several.needs)
    check_bounds(Faults(), one.needs)
    with pytest.raises(ConfigError, match="faults.mismatch_max: does nothing where a sampled batch gets one on-policy"):
        check_bounds(Faults(mismatch_max=1.0), one.needs)
