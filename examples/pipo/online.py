"""Draws online runs with and without PIPO, as figures 2, 3b, 4 and 5 of its paper do:
`python examples/figures.py online RUN ... --out FILE`.

Runs that differ in their seed are one line, their mean, with their range. An algorithm has one colour, dashed without
PIPO. The accuracy is the mean over benchmarks of each evaluated checkpoint, or that of data.validation in the run.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from examples.drawing import COLORS, smooth
from examples.grids.collect import clock
from megatron_rft.report.groups import RunGroup, grouped
from megatron_rft.report.runs import RecordedRun, read

Points = dict[float, float]
PANELS = (
    ("Accuracy", "pass@1", "step"),
    ("Reward", "verifier reward", "step"),
    ("Response length", "tokens", "step"),
    ("Gradient norm", "before clipping", "step"),
    ("Accuracy over time", "pass@1", "hours"),
)
METRICS = {"Reward": "reward/mean", "Response length": "response/length_mean", "Gradient norm": "policy/grad_norm"}


@dataclass(frozen=True)
class Line:
    group: RunGroup
    color: str

    @property
    def style(self) -> str:
        return "-" if self.group.runs[0].recipe.get("pipo") else "--"

    def of(self, panel: str) -> list[Points]:
        """Of each run."""
        if metric := METRICS.get(panel):
            found = [run.of(metric) for run in self.group.runs]
            return [dict(zip(steps, smooth(values), strict=True)) for steps, values in found if steps]
        points = [accuracy(run) for run in self.group.runs]
        if panel == "Accuracy over time":
            clocks = [hours(run) for run in self.group.runs]
            points = [
                {clock[s]: v for s, v in each.items() if s in clock} for each, clock in zip(points, clocks, strict=True)
            ]
        return [each for each in points if each]


def accuracy(run: RecordedRun) -> Points:
    """Accuracy by step: the mean over the benchmarks of evaluated checkpoints, else the run's validation accuracy."""
    found = {}
    for path in sorted((run.folder / "evaluation").glob("step_*/results.json")):
        found[int(path.parent.name.rpartition("_")[2])] = fmean(
            each["pass_at_1"] for each in json.loads(path.read_text()) if each["pass_at_1"] is not None
        )
    return found or dict(zip(*run.of("evaluation/pass@1"), strict=True))


def hours(run: RecordedRun) -> Points:
    """Hours since the start, by step."""
    return clock(run.records)


def lines_of(folders: list[Path]) -> list[Line]:
    groups = grouped([read(Path(folder)) for folder in folders])
    names = [str((group.runs[0].recipe.get("algorithm") or {}).get("name")) for group in groups]
    colors = {name: COLORS[number % len(COLORS)] for number, name in enumerate(dict.fromkeys(names))}
    return [Line(group, colors[name]) for group, name in zip(groups, names, strict=True)]


def draw(folders: list[Path], path: Path) -> Path:
    """Draw the figure into `path`. Raises UserError if a folder holds no run."""
    lines = lines_of(folders)
    figure = Figure(figsize=(14, 7), layout="constrained", dpi=120)
    places = figure.subplots(2, 3).flatten()
    for axes, (panel, unit, over) in zip(places, PANELS, strict=False):
        for line in lines:
            _draw(axes, line, panel)
        axes.set(xlabel=over, ylabel=unit)
        axes.set_title(panel, fontsize=10.5, fontweight="bold", loc="left")
        axes.grid(alpha=0.25, linewidth=0.6)
    _bars(places[5], lines)
    handles = [places[0].plot([], [], line.style, color=line.color, label=line.group.name)[0] for line in lines]
    figure.legend(handles, [line.group.name for line in lines], loc="outside lower center", ncols=4)
    figure.savefig(path)
    return path


def _draw(axes: Axes, line: Line, panel: str) -> None:
    each = line.of(panel)
    if panel == "Accuracy over time":  # every seed has its own clock
        for points in each:
            axes.plot(list(points), list(points.values()), line.style, color=line.color, linewidth=1.4)
    elif each:
        steps = sorted(set.intersection(*map(set, each)))
        columns = [[points[step] for points in each] for step in steps]
        axes.plot(steps, [fmean(column) for column in columns], line.style, color=line.color, linewidth=1.6)
        axes.fill_between(steps, [min(c) for c in columns], [max(c) for c in columns], color=line.color, alpha=0.15)


def _bars(axes: Axes, lines: list[Line]) -> None:
    totals = [fmean(max(hours(run).values()) for run in line.group.runs) for line in lines]
    axes.barh([line.group.name for line in lines], totals, color=[line.color for line in lines], alpha=0.7)
    axes.invert_yaxis()
    axes.set_xlabel("hours")
    axes.set_title("Time of all steps", fontsize=10.5, fontweight="bold", loc="left")
