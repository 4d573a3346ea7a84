import sys

import pytest

from megatron_rft.tracking.progress import clock_time, make_progress, phase_seconds

STEP = {
    "reward/mean": 0.4125,
    "policy/kl": 0.00123,
    "pipo/xi": -0.82,
    "seconds/step": 3.1,
    "seconds/generation": 1.6,
    "seconds/training": 1.2,
    "seconds/other": 0.3,
    "evaluation/pass@1": 0.31,
    "evaluation/pass@1_se": 0.02,
}


def test_clock_time():
    assert clock_time(65.9) == "1:05" and clock_time(3725) == "1:02:05"


def test_phases_are_sorted_and_without_the_sum():
    assert list(phase_seconds(STEP)) == ["generation", "training", "other"]


def test_plain_lines(capsys):
    progress = make_progress("plain", 200)
    progress.log(0, {"evaluation/pass@1": 0.25})
    progress.log(12, STEP)
    progress.note("saved [step 12]")
    first, second, note = capsys.readouterr().out.splitlines()
    assert first == "step   0/200  held-out pass@1 0.250"
    assert second.startswith(
        "step  12/200  reward 0.412  KL 0.0012  PIPO xi -0.82  held-out pass@1 0.310 ± 0.020  "
        "3.1 s (generation 1.6, training 1.2, other 0.3)  left "
    )
    assert note == "saved [step 12]"


def test_it_names_a_slow_rank(capsys):
    slow = STEP | {"ranks/slowest": 3.0, "ranks/work_slowest": 1.5, "ranks/work_median": 1.2}
    for metrics, told in ((slow, True), (slow | {"ranks/work_slowest": 1.4}, False), (STEP, False)):
        make_progress("plain", 200).log(1, metrics)
        assert ("slowest rank 3: 1.5 s, median 1.2" in capsys.readouterr().out) == told


@pytest.mark.parametrize("kind, bars", [("auto", 2), ("plain", 0)])
def test_a_bar_on_a_terminal(capsys, monkeypatch, kind, bars):
    """A step replaces the bar's line, a note stays, and the last bar ends its line."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    progress = make_progress(kind, 4)
    for step in (1, 2):
        progress.log(step, {"reward/mean": 0.5})
    progress.note("a note [with brackets]")
    progress.log(4, {})
    progress.close()
    told = capsys.readouterr().out
    assert told.count("\r\x1b[K") == bars + bool(bars) and "\na note [with brackets]\n" in told
    assert told.endswith("\n") and ("[##########          ] step 2/4" in told) == bool(bars)


def test_auto_has_lines_without_a_terminal(capsys):
    make_progress("auto", 3).log(1, STEP)
    assert capsys.readouterr().out.startswith("step 1/3  reward 0.412")
    quiet = make_progress("none", 3)
    quiet.log(1, STEP)
    quiet.note("unseen")
    quiet.close()
    assert capsys.readouterr().out == ""
