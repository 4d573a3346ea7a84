"""Displays a run's progress, a line per step: a bar on a terminal, else in the log. Rank 0 only.

It shows those metrics of SHOWN that a step has, so one display serves every trainer.
"""

import html
import re
import shutil
import sys
import time
from collections import deque
from collections.abc import Mapping

# (metric, label, format), in the order of display
SHOWN = (
    ("reward/mean", "reward", "{:.3f}"),
    ("policy/loss", "loss", "{:.4f}"),
    ("policy/kl", "KL", "{:.4f}"),
    ("policy/entropy", "entropy", "{:.3f}"),
    ("pipo/xi", "PIPO xi", "{:+.2f}"),
    ("response/length_mean", "length", "{:.1f}"),
    ("policy/grad_norm", "grad norm", "{:.3f}"),
    ("mismatch/kl", "mismatch KL", "{:.1e}"),
    ("tokens/per_second", "tokens/s", "{:,.0f}"),
    ("memory/peak_gib", "peak GiB", "{:.1f}"),
    ("reward/grader_errors", "grader errors", "{:.0f}"),
)
FAULTS = "reward/grader_errors"  # shown where they are not 0
PACE_STEPS = 20  # steps whose mean time predicts the time left
SLOWER = 1.2  # a rank that works longer than this multiple of the median is slow


class Progress:
    """Makes a line of each step, which shows numbers only:

    step 12/200  reward 0.412  KL 0.0012  PIPO xi +0.82  3.1 s (generation 1.6, training 1.2)  left 9:43
    """

    def __init__(self, total_steps: int = 0, bar: "StepBar | None" = None):
        """`bar`: None shows nothing."""
        self.total_steps, self._bar = total_steps, bar
        self._ends: deque[tuple[int, float]] = deque([], maxlen=PACE_STEPS + 1)  # (step, seconds at its end)

    def left(self) -> float | None:
        """Return the seconds left by the mean wall time of the last steps, including evaluations and checkpoints."""
        if len(self._ends) < 2:
            return None
        (first, began), (last, ended) = self._ends[0], self._ends[-1]
        return (ended - began) / max(last - first, 1) * (self.total_steps - last)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a finished step. `metrics` may consist of an evaluation only."""
        self._ends.append((step, time.monotonic()))
        parts = [f"step {step:>{len(str(self.total_steps))}}/{self.total_steps}"]
        parts += [f"{label} {number}" for label, number in shown(metrics)]
        if (held_out := accuracy(metrics)) is not None:
            parts.append(f"held-out pass@1 {held_out}")
        if "seconds/step" in metrics:
            longest = ", ".join(f"{name} {value:.1f}" for name, value in list(phase_seconds(metrics).items())[:3])
            parts.append(f"{metrics['seconds/step']:.1f} s ({longest})")
        if (slow := slow_rank(metrics)) is not None:
            parts.append(slow)
        if (left := self.left()) is not None:
            parts.append(f"left {clock_time(left)}")
        self.note("  ".join(parts))

    def note(self, text: str) -> None:
        """Show a line."""
        if self._bar:
            self._bar.show(text)

    def close(self) -> None:
        if self._bar:
            self._bar.close()


def make_progress(kind: str, total_steps: int) -> Progress:
    """Create a display. `kind`: auto (a bar on a terminal, lines elsewhere), plain (lines) or none."""
    return Progress(total_steps, None if kind == "none" else StepBar(moves=kind == "auto"))


def shown(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return (label, number) of each metric of SHOWN that a step has."""
    there = [each for each in SHOWN if metrics.get(each[0]) is not None]
    return [(label, form.format(metrics[name])) for name, label, form in there if metrics[name] or name != FAULTS]


def accuracy(metrics: Mapping[str, float]) -> str | None:
    """Return an evaluation's result as `0.412 ± 0.017`; None if the step has no evaluation."""
    if "evaluation/pass@1" not in metrics:
        return None
    error = metrics.get("evaluation/pass@1_se")
    return f"{metrics['evaluation/pass@1']:.3f}" + ("" if error is None else f" ± {error:.3f}")


def phase_seconds(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each phase, the longest first."""
    phases = {name.removeprefix("seconds/"): value for name, value in metrics.items() if name.startswith("seconds/")}
    phases.pop("step", None)
    return dict(sorted(phases.items(), key=lambda item: -item[1]))


def slow_rank(metrics: Mapping[str, float]) -> str | None:
    """Return the rank that was slow in a step as `slowest rank 3: 1.5 s, median 1.0`; None if there is none."""
    slowest, median = metrics.get("ranks/work_slowest"), metrics.get("ranks/work_median")
    if slowest is None or median is None or slowest <= SLOWER * median:
        return None
    return f"slowest rank {metrics['ranks/slowest']:.0f}: {slowest:.1f} s, median {median:.1f}"


def clock_time(seconds: float) -> str:
    """Format seconds: 3725 -> 1:02:05, 65 -> 1:05."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


class StepBar:
    """Shows the output of a run, also of one in another process: a step's line moves a bar, others are printed. In a
    notebook the bar is HTML, on a terminal the last line; elsewhere there is none."""

    def __init__(self, moves: bool = True) -> None:
        """`moves`: whether there may be a bar."""
        shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()  # a notebook's has a kernel
        self._moves, self._notebook, self._bar = moves, hasattr(shell, "kernel"), None

    def show(self, line: str) -> bool:
        """Whether the line is of a step."""
        step = re.match(r"step +(\d+)/(\d+)  ", line)
        if step and self._moves and self._notebook:
            value, most = step.groups()
            self._draw(f"<progress value={value} max={most}></progress> <code>{html.escape(line)}</code>")
        elif step and self._moves and sys.stdout.isatty():
            done = round(20 * int(step[1]) / max(int(step[2]), 1))
            self._bar = f"\r\x1b[K[{'#' * done:20}] {line}"[: shutil.get_terminal_size().columns + 4]
            print(self._bar, end="", flush=True)
        else:
            self.close()
            print(line, flush=True)
        return bool(step)

    def _draw(self, page: str) -> None:
        from IPython.display import HTML, display

        if self._bar is None:
            self._bar = display(HTML(page), display_id=True)
        else:
            self._bar.update(HTML(page))

    def close(self) -> None:
        """End the line of a terminal's bar."""
        if isinstance(self._bar, str):
            print()
            self._bar = None
