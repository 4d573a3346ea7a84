"""Displays a run's progress: live on a terminal, or one line per step. Rank 0 only.

It shows those metrics of SHOWN that a step has, so one display serves every trainer.
"""

import html
import math
import re
import shutil
import sys
import time
from collections import deque
from collections.abc import Mapping

from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

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
# The display draws a sparkline of the first one that the run has
TREND = ("reward/mean", "policy/loss")
BLOCKS = "▁▂▃▄▅▆▇█"
PACE_STEPS = 20  # steps whose mean time predicts the time left
SLOWER = 1.2  # a rank that works longer than this multiple of the median is slow


class Progress:
    """A display. This one shows nothing."""

    def __init__(self, total_steps: int = 0):
        self.total_steps = total_steps
        self._ends: deque[tuple[int, float]] = deque([], maxlen=PACE_STEPS + 1)  # (step, seconds at its end)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a finished step. `metrics` may consist of an evaluation only."""
        self._ends.append((step, time.monotonic()))

    def left(self) -> float | None:
        """Return the seconds left by the mean wall time of the last steps, including evaluations and checkpoints."""
        if len(self._ends) < 2:
            return None
        (first, began), (last, ended) = self._ends[0], self._ends[-1]
        return (ended - began) / max(last - first, 1) * (self.total_steps - last)

    def example(self, text: str) -> None:
        """Show one response of the model."""

    def note(self, text: str) -> None:
        """Print one line, which stays on the screen."""

    def close(self) -> None:
        """Leave the screen as it is."""


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


def sparkline(values: list[float], width: int) -> str:
    """Draw the last `width` finite values with block characters."""
    values = [value for value in values if math.isfinite(value)][-width:]
    low, high = min(values, default=0.0), max(values, default=0.0)
    top = len(BLOCKS) - 1
    return "".join(BLOCKS[round((v - low) / (high - low) * top) if high > low else top // 2] for v in values)


def clock_time(seconds: float) -> str:
    """Format seconds: 3725 -> 1:02:05, 65 -> 1:05."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


class PlainProgress(Progress):
    """Prints one line per step, for logs and pipes; a log shows numbers only:

    step 12/200  reward 0.412  KL 0.0012  PIPO xi +0.82  3.1 s (generation 1.6, training 1.2)  left 9:43
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        super().log(step, metrics)
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
        print("  ".join(parts), flush=True)

    def note(self, text: str) -> None:
        print(text, flush=True)


class RichProgress(Progress):
    """Shows a live display at the bottom of a terminal; notes and other output scroll above it."""

    def __init__(self, total_steps: int, title: str, console: Console | None = None):
        super().__init__(total_steps)
        self._title = title
        self._step = 0
        self._metrics: dict[str, float] = {}  # of the last step
        self._trends: dict[str, list[float]] = {name: [] for name in TREND}
        self._accuracies: list[str] = []
        self._example = ""
        self._live = Live(self._draw(), console=console, refresh_per_second=4, transient=False)
        self._live.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        super().log(step, metrics)
        self._step = step
        self._metrics = dict(metrics)
        for name, values in self._trends.items():
            if name in metrics:
                values.append(metrics[name])
        if (held_out := accuracy(metrics)) is not None:
            self._accuracies.append(held_out)
        self._live.update(self._draw())

    def example(self, text: str) -> None:
        self._example = text
        self._live.update(self._draw())

    def note(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._live.stop()

    def _draw(self) -> Panel:
        rows = [self._draw_bar(), self._draw_numbers(), self._draw_trend(), self._draw_phases(), self._draw_example()]
        return Panel(Group(*(row for row in rows if row is not None)), title=Text(self._title), title_align="left")

    def _draw_bar(self) -> Table:
        left = self.left()
        row = Table.grid(expand=True, padding=(0, 1))
        for ratio in (None, 1, None):
            row.add_column(ratio=ratio, no_wrap=True)
        bar = ProgressBar(total=self.total_steps, completed=self._step)
        row.add_row(f"step {self._step}/{self.total_steps}", bar, "" if left is None else f"{clock_time(left)} left")
        return row

    def _draw_numbers(self) -> Columns:
        numbers = shown(self._metrics)
        return Columns([Text.assemble((f"{label} ", "dim"), (number, "bold")) for label, number in numbers], (0, 3))

    def _draw_trend(self) -> Text | None:
        name, values = next(((n, v) for n, v in self._trends.items() if v), (None, []))
        if name is None and not self._accuracies:
            return None
        line = Text()
        if name is not None:
            line.append(f"{name.removesuffix('/mean')} ", "dim").append(sparkline(values, 40), "green")
        if self._accuracies:
            line.append("   held-out pass@1 ", "dim").append(self._accuracies[0], "bold")
            if len(self._accuracies) > 1:
                line.append(f" → {self._accuracies[-1]}", "bold green")
        return line

    def _draw_phases(self) -> Text | None:
        phases = phase_seconds(self._metrics)
        if not phases:
            return None
        line = Text.assemble(
            ("seconds ", "dim"), (f"{self._metrics.get('seconds/step', sum(phases.values())):.1f}", "bold")
        )
        for name, value in phases.items():
            line.append(f"  {name} ", "dim").append(f"{value:.1f}")
        if (slow := slow_rank(self._metrics)) is not None:
            line.append(f"  {slow}", "yellow")
        return line

    def _draw_example(self) -> Text | None:
        if not self._example:
            return None
        example = Text(self._example.strip(), style="italic", overflow="ellipsis")
        return Text("\n").join(example.split("\n")[:6])


def make_progress(kind: str, total_steps: int, title: str) -> Progress:
    """Create a display. `kind`: auto (rich on a terminal, plain elsewhere), rich, plain or none."""
    if kind == "auto":
        kind = "rich" if sys.stdout.isatty() and not Console().is_dumb_terminal else "plain"
    if kind == "rich":
        return RichProgress(total_steps, title)
    return {"plain": PlainProgress, "none": Progress}[kind](total_steps)


class StepBar:
    """Shows the output of a run in another process: a line of PlainProgress moves a bar, the others are printed. In a
    notebook the bar is HTML, on a terminal the last line; elsewhere there is none."""

    def __init__(self) -> None:
        self._notebook, self._bar = "ipykernel" in sys.modules, None

    def show(self, line: str) -> bool:
        """Whether the line is of a step."""
        step = re.match(r"step +(\d+)/(\d+)  ", line)
        if step and self._notebook:
            value, most = step.groups()
            self._draw(f"<progress value={value} max={most}></progress> <code>{html.escape(line)}</code>")
        elif step and sys.stdout.isatty():
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
