import io
import math
import re

import pytest
from rich.console import Console

from megatron_rft.tracking.progress import (
    PlainProgress,
    Progress,
    RichProgress,
    clock_time,
    make_progress,
    phase_seconds,
    sparkline,
)

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


def test_sparkline():
    assert sparkline([0, 1, 2, 7], 10) == "▁▂▃█"
    assert sparkline([5, 0, 7], 2) == "▁█"
    assert sparkline([0.5, 0.5], 9) == "▄▄"
    assert sparkline([math.nan, 0, 1], 9) == "▁█" and sparkline([], 9) == ""


def test_clock_time():
    assert clock_time(65.9) == "1:05" and clock_time(3725) == "1:02:05"


def test_phases_are_sorted_and_without_the_sum():
    assert list(phase_seconds(STEP)) == ["generation", "training", "other"]


def test_plain_lines(capsys):
    progress = PlainProgress(200)
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


def test_both_name_a_slow_rank(capsys):
    slow = STEP | {"ranks/slowest": 3.0, "ranks/work_slowest": 1.5, "ranks/work_median": 1.2}
    for metrics, told in ((slow, True), (slow | {"ranks/work_slowest": 1.4}, False), (STEP, False)):
        PlainProgress(200).log(1, metrics)
        for screen in (capsys.readouterr().out, shown([STEP, metrics])):
            assert ("slowest rank 3: 1.5 s, median 1.2" in screen) == told


def shown(step_metrics: list[dict], width: int = 100) -> str:
    """The final text on the screen, without the terminal's codes."""
    screen = io.StringIO()
    progress = RichProgress(200, "my run", Console(file=screen, force_terminal=True, width=width, height=40))
    for step, metrics in enumerate(step_metrics):
        progress.log(step, metrics)
    progress.example("[1 + 1] = \\boxed{2}")
    progress.note("a note [with brackets]")
    progress.close()
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())


def test_live_display_shows_the_numbers():
    screen = shown([{"evaluation/pass@1": 0.25}, STEP])
    for text in (
        "my run",
        "step 1/200",
        "reward 0.412",
        "PIPO xi -0.82",
        "0.250",
        "→ 0.310 ± 0.020",
        "generation 1.6",
        "[1 + 1] = \\boxed{2}",
        "a note [with brackets]",
    ):
        assert text in screen, text


@pytest.mark.parametrize("width", [20, 60, 200])
def test_live_display_survives_narrow_terminals_and_nan(width):
    assert "step" in shown([{"reward/mean": math.nan, "policy/loss": math.inf}, {}], width)


def test_auto_is_plain_without_a_terminal(capsys):
    assert isinstance(make_progress("auto", 3, "run"), PlainProgress)
    quiet = make_progress("none", 3, "run")
    assert type(quiet) is Progress
    quiet.log(1, STEP)
    quiet.note("unseen")
    assert capsys.readouterr().out == ""
