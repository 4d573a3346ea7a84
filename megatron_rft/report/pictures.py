"""Draws the report's charts as PNG files: all of them in one file, and each in its own. Imports no torch."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from megatron_rft.report.charts import Chart, phases, shown
from megatron_rft.report.groups import RunGroup, grouped
from megatron_rft.report.runs import read, smooth

# Okabe and Ito's colours, which colour-blind readers can distinguish
BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, YELLOW, GREY = "#CC79A7", "#56B4E9", "#F0E442", "#777777"
COLORS = (BLUE, RED, GREEN, PURPLE, ORANGE, SKY, GREY)  # for groups; the page uses the same
PHASE_COLORS = (BLUE, ORANGE, GREEN, SKY, PURPLE, YELLOW, RED, GREY)
STYLES = ("-", "--", ":")  # of a chart's lines
FEW = 20  # curves with fewer points are not smoothed
MOST_BARS = 40


def write(groups: list[RunGroup], out: Path) -> list[Path]:
    """Write `out`/report.png with all charts, and each chart in `out`/charts. Returns the paths."""
    whole = _together(groups, out / "report.png")
    return [whole, *(_alone(chart, groups, out / "charts") for chart in shown(groups))]


def draw_run(run_dir: Path) -> Path:
    """Draw all charts of one run in RUN/curves.png. Returns its path."""
    return _together(grouped([read(Path(run_dir))]), Path(run_dir) / "curves.png")


def _together(groups: list[RunGroup], path: Path) -> Path:
    charts = shown(groups)
    with_phases = len(groups) == 1 and bool(phases(groups))
    count = len(charts) + with_phases
    columns = min(count, 4) or 1
    rows = max(-(-count // columns), 1)
    figure = Figure(figsize=(4.2 * columns, 3.0 * rows + 0.5), layout="constrained", dpi=110)
    for number, chart in enumerate(charts, start=1):
        draw(figure.add_subplot(rows, columns, number), chart, groups)
    if with_phases:
        draw_phases(figure.add_subplot(rows, columns, count), groups[0])
    handles, labels = _legend(groups)
    figure.legend(handles, labels, loc="outside upper left", ncols=5, frameon=False)
    figure.savefig(path)
    return path


def _alone(chart: Chart, groups: list[RunGroup], folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    figure = Figure(figsize=(5.6, 3.8), layout="constrained", dpi=150)
    draw(figure.add_subplot(), chart, groups)
    if len(groups) > 1:
        figure.legend(*_legend(groups), loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    path = folder / f"{chart.id}.png"
    figure.savefig(path)
    return path


def _legend(groups: list[RunGroup]) -> tuple[list, list[str]]:
    handles = [Line2D([], [], color=color, linewidth=2) for _, color in coloured(groups)]
    return handles, [group.name + (f" ({len(group.runs)} seeds)" if len(group.runs) > 1 else "") for group in groups]


def coloured(groups: list[RunGroup]) -> list[tuple[RunGroup, str]]:
    return [(group, COLORS[number % len(COLORS)]) for number, group in enumerate(groups)]


def draw(axes: Axes, chart: Chart, groups: list[RunGroup]) -> None:
    for group, color in coloured(groups):
        for metric, style in zip(chart.lines, STYLES, strict=False):
            if group.has(metric):
                _line(axes, group, metric, color, style)
    there = [metric for metric in chart.lines if any(group.has(metric) for group in groups)]
    if len(there) > 1:
        for (metric, label), style in zip(chart.lines.items(), STYLES, strict=False):
            if metric in there:
                axes.plot([], [], style, color=GREY, label=label)
        axes.legend(fontsize=7.5, framealpha=0.75)
    if chart.log:
        axes.set_yscale("log", nonpositive="mask")
    elif chart.floor is not None:
        axes.set_ylim(bottom=chart.floor)
    _finish(axes, chart.title, chart.unit)


def draw_phases(axes: Axes, group: RunGroup) -> None:
    """Draw seconds per step, stacked by phase, as means over bins of steps. Small phases are joined as "others"."""
    names = phases([group])
    shown_alone = names if len(names) <= 7 else names[:6]
    parts = {name.removeprefix("seconds/"): [name] for name in shown_alone} | {"others": names[len(shown_alone) :]}
    records = [record for run in group.runs for record in run.records if record.get("seconds/step") is not None]
    width = -(-len(records) // MOST_BARS)
    bins = [records[i : i + width] for i in range(0, len(records), width)]
    steps = [(many[0]["step"] + many[-1]["step"]) / 2 for many in bins]
    bottom = [0.0] * len(bins)
    for (label, some), color in zip(parts.items(), PHASE_COLORS, strict=False):
        if some:
            heights = [sum(record.get(name) or 0.0 for record in many for name in some) / len(many) for many in bins]
            axes.bar(steps, heights, bottom=bottom, width=width, color=color, label=label, alpha=0.85)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_ylim(0, max(bottom, default=0) * 1.45 or 1)  # room for the legend
    axes.legend(fontsize=7.5, framealpha=0.75, loc="upper center", ncols=3, columnspacing=1.0)
    _finish(axes, "Time per step", "seconds, by phase")


def _finish(axes: Axes, title: str, unit: str) -> None:
    axes.set_title(title, fontsize=10.5, fontweight="bold", loc="left")
    axes.set_ylabel(unit, fontsize=9)
    axes.set_xlabel("step", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _line(axes: Axes, group: RunGroup, metric: str, color: str, style: str) -> None:
    series = group.series(metric)
    points = [
        (step, mean, (series.error[i] or 0.0) if series.error else 0.0)
        for i, (step, mean) in enumerate(zip(group.steps, series.mean, strict=True))
        if mean is not None
    ]
    steps, means, errors = (list(part) for part in zip(*points, strict=True))
    if len(means) >= FEW:
        if len(group.runs) == 1:
            axes.plot(steps, means, style, color=color, alpha=0.25, linewidth=0.8)
        means, errors = smooth(means), smooth(errors)
    axes.plot(steps, means, style, color=color, linewidth=1.6, marker="o" if len(means) < FEW else "", markersize=3)
    if any(errors):
        low, high = ([mean + sign * error for mean, error in zip(means, errors, strict=True)] for sign in (-1, 1))
        axes.fill_between(steps, low, high, color=color, alpha=0.18, linewidth=0)
