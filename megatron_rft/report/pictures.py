"""The report's charts as PNG files: one with all of them, and each alone, for a slide or a paper."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_rft.report.charts import Chart, shown
from megatron_rft.report.groups import Group
from megatron_rft.report.plots import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, SKY, smooth

COLORS = (BLUE, RED, GREEN, PURPLE, ORANGE, SKY, GREY)  # of the groups, as on the page
STYLES = {"solid": "-", "dashed": "--", "dotted": ":"}
FEW = 20  # points: fewer are drawn as they are


def write(groups: list[Group], out: Path) -> list[Path]:
    charts = shown(groups)
    columns = min(len(charts), 4) or 1
    rows = max(-(-len(charts) // columns), 1)
    whole = Figure(figsize=(4.2 * columns, 3.0 * rows + 0.5), layout="constrained", dpi=110)
    for place, chart in enumerate(charts):
        draw(whole.add_subplot(rows, columns, place + 1), chart, groups)
    handles, labels = _legend(groups)
    whole.legend(handles, labels, loc="outside upper left", ncols=5, frameon=False)
    whole.savefig(out / "report.png")
    return [out / "report.png", *(_alone(chart, groups, out / "charts") for chart in charts)]


def _alone(chart: Chart, groups: list[Group], folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    figure = Figure(figsize=(5.6, 3.8), layout="constrained", dpi=150)
    draw(figure.add_subplot(), chart, groups)
    if len(groups) > 1:
        figure.legend(*_legend(groups), loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    path = folder / f"{chart.id}.png"
    figure.savefig(path)
    return path


def _legend(groups: list[Group]) -> tuple[list, list[str]]:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=color, linewidth=2) for _, color in coloured(groups)]
    return handles, [group.name + (f" ({len(group.runs)} seeds)" if len(group.runs) > 1 else "") for group in groups]


def coloured(groups: list[Group]) -> list[tuple[Group, str]]:
    return [(group, COLORS[place % len(COLORS)]) for place, group in enumerate(groups)]


def draw(axes: Axes, chart: Chart, groups: list[Group]) -> None:
    for group, color in coloured(groups):
        for line in chart.lines:
            if group.has(line.metric):
                _line(axes, group, line.metric, color, STYLES[line.dash])
    labels = [line for line in chart.lines if any(group.has(line.metric) for group in groups)]
    if len(labels) > 1:
        for line in labels:
            axes.plot([], [], STYLES[line.dash], color=GREY, label=line.label)
        axes.legend(fontsize=7.5, framealpha=0.75)
    if chart.log:
        axes.set_yscale("log", nonpositive="mask")
    elif chart.floor is not None:
        axes.set_ylim(bottom=chart.floor)
    axes.set_title(chart.title, fontsize=10.5, fontweight="bold", loc="left")
    axes.set_ylabel(chart.unit, fontsize=9)
    axes.set_xlabel("step", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _line(axes: Axes, group: Group, metric: str, color: str, style: str) -> None:
    series = group.series(metric)
    points = [
        (place, mean, (series.error[i] or 0.0) if series.error else 0.0)
        for i, (place, mean) in enumerate(zip(group.places, series.mean, strict=True))
        if mean is not None
    ]
    places, means, errors = (list(part) for part in zip(*points, strict=True))
    if len(means) >= FEW:
        if len(group.runs) == 1:
            axes.plot(places, means, style, color=color, alpha=0.25, linewidth=0.8)
        means, errors = smooth(means), smooth(errors)
    axes.plot(places, means, style, color=color, linewidth=1.6, marker="o" if len(means) < FEW else "", markersize=3)
    if any(errors):
        low, high = ([mean + sign * error for mean, error in zip(means, errors, strict=True)] for sign in (-1, 1))
        axes.fill_between(places, low, high, color=color, alpha=0.18, linewidth=0)
