"""Each alarm on the metrics of a run that has its failure, and of one that has not."""

from copy import deepcopy
from types import SimpleNamespace

import pytest

from megatron_rft.config import Faults
from megatron_rft.training.monitor import ALARMS, STEPS, Alarm, Loads, MismatchBounds
from megatron_rft.utils.errors import RunFailed
from tests.integration.tiny import ROOT

HEALTHY = {
    "policy/entropy": 1.0,
    "response/length_mean": 20.0,
    "response/finished": 0.9,
    "reward/group_std": 0.3,
    "reward/all_right_groups": 0.4,
    "reward/all_wrong_groups": 0.5,
    "policy/kl": 0.1,
    "pipo/suppressed": 0.0,
    "constraint/improved": 0.2,
    "constraint/refined": 8.0,
    "dynamics/future_weight_saturated": 0.5,
    "experts/load_min": 0.2,
}
ALIKE = {"mismatch/kl": 1e-4, "mismatch/share": 0.02, "mismatch/max": 3.0}
FAILURES = {
    "the entropy has collapsed": {"policy/entropy": 0.05},
    "the responses explode": {"response/length_mean": 50.0, "response/finished": 0.2},
    "no response ends": {"response/finished": 0.0},
    "in every group": {"reward/group_std": 0.0},
    "far from the reference": {"policy/kl": 1.5},
    "PIPO has suppressed": {"pipo/suppressed": 1.0},
    "the refiner has improved": {"constraint/improved": 0.0},
    "FPA's weights": {"dynamics/future_weight_saturated": 1.0},
    "some expert got no token": {"experts/load_min": 0.0},
}


def check(alarms: list[Alarm], metrics: dict[str, float], step: int) -> list[str]:
    return [told for alarm in alarms if (told := alarm.end_of_step(step, metrics))]


def test_a_healthy_run_has_none():
    alarms = deepcopy(ALARMS)
    assert not [told for step in range(1, 60) for told in check(alarms, HEALTHY, step)]
    assert not [told for step in range(60, 90) for told in check(alarms, {"policy/nll": 1.0}, step)]


def test_groups_of_one_response_always_agree():
    alone = HEALTHY | {"reward/all_right_groups": 0.75, "reward/all_wrong_groups": 0.25}
    del alone["reward/group_std"]
    alarms = deepcopy(ALARMS)
    assert not [told for step in range(1, 30) for told in check(alarms, alone, step)]


def test_wrong_responses_with_different_rewards_have_advantages():
    """As in the tiers of a reward of code: none is right, and some are better than others."""
    tiers = HEALTHY | {"reward/all_right_groups": 0.0, "reward/all_wrong_groups": 1.0}
    alarms = deepcopy(ALARMS)
    assert not [told for step in range(1, 30) for told in check(alarms, tiers, step)]


def test_a_refiner_without_work_has_not_failed():
    alarms, done = deepcopy(ALARMS), HEALTHY | {"constraint/improved": 0.0, "constraint/refined": 0.0}
    assert not [told for step in range(1, 30) for told in check(alarms, done, step)]


def test_a_skipped_step_disables_no_alarm():
    """Its metrics are NaN."""
    alarms, nan, low = deepcopy(ALARMS), {"policy/entropy": float("nan")}, {"policy/entropy": 0.05}
    kinds = [HEALTHY | nan] + [HEALTHY] * 24 + [HEALTHY | low] * 5 + [HEALTHY | nan] + [HEALTHY | low] * 5
    told = [(step, each) for step, metrics in enumerate(kinds, 1) for each in check(alarms, metrics, step)]
    assert [step for step, _ in told] == [25 + STEPS + 1] and "the entropy has collapsed" in told[0][1]


@pytest.mark.parametrize("sentence", FAILURES)
def test_a_failure_is_told_once_until_it_has_ceased(sentence):
    alarms, told = deepcopy(ALARMS), []
    kinds = [HEALTHY] * 25 + [HEALTHY | FAILURES[sentence]] * 15 + [HEALTHY] * 3 + [HEALTHY | FAILURES[sentence]] * 15
    for step, metrics in enumerate(kinds, start=1):
        told += [(step, each) for each in check(alarms, metrics, step)]
    assert [step for step, _ in told] == [25 + STEPS, 25 + 15 + 3 + STEPS], told
    assert all(sentence in each and "See docs/" in each for _, each in told)


def test_each_names_a_page_that_exists():
    assert len(ALARMS) == len(FAILURES)
    for alarm in ALARMS:
        page, _, heading = alarm.page.partition(", ")
        text = (ROOT / page).read_text()
        assert not heading or f"## {heading}\n" in text


def test_within_the_bounds_or_without_numbers():
    assert (
        MismatchBounds(Faults()).end_of_step(3, ALIKE) is None and MismatchBounds(Faults()).end_of_step(3, {}) is None
    )


@pytest.mark.parametrize("name, value, bound", [("kl", 0.2, 0.05), ("share", 0.5, 0.25), ("kl", float("nan"), 0.05)])
def test_an_alarm_is_told_or_ends_the_run(name, value, bound):
    metrics = ALIKE | {f"mismatch/{name}": value}
    told = f"step 3: .*mismatch/{name} {value:.3g} is above faults.mismatch_{name}, {bound:g}\\. `megatron-rft diagnose"
    with pytest.raises(RunFailed, match=told):
        MismatchBounds(Faults(on_mismatch="stop")).end_of_step(3, metrics)
    assert MismatchBounds(Faults()).end_of_step(3, metrics).startswith("step 3: engine and trainer disagree")
    never = Faults(mismatch_kl=1e9) if name == "kl" else Faults(mismatch_share=1.0)
    assert (MismatchBounds(never).end_of_step(3, metrics) is None) == (value == value), "NaN is told whatever the bound"


@pytest.mark.parametrize(
    "loads, found",
    [({1: [150, 0, 150], 3: [5, 5, 5]}, {"experts/load_max": 1.5, "experts/load_min": 0.0}), ({}, {})],
    ids=["of two layers", "none"],
)
def test_the_extremes_of_the_experts_loads(loads, found):
    written, metrics = [], {}
    Loads(SimpleNamespace(take=lambda: loads), lambda *each: written.append(each)).end_of_step(7, metrics)
    assert metrics == found and written == ([(7, loads)] if loads else [])
