"""Draws runs under different constraints side by side, as figures 4, 5b and 7 of the dynamic constraint's paper do:
`python examples/figures.py constraints RUN ... --out FILE`.

Runs whose recipes have the same constraint are seeds: one line shows their mean, a band their range. A panel is drawn
if a run has its metric. KL is measured every `constraint.kl_every` steps, cross entropy in steps with pairs.
"""

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from examples.drawing import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, SKY, smooth
from megatron_rft.report.runs import RecordedRun, read

KIND_COLORS = {"static": BLUE, "none": RED, "dynamic": ORANGE}  # the paper's
MORE_COLORS = (GREEN, PURPLE, SKY, GREY)
PANELS = (
    ("reward/mean", "Reward", "verifier reward"),
    ("constraint/kl", "KL to the reference", "nats per token"),
    ("constraint/cross_entropy", "Cross entropy to the refiner", "nats per token of a'"),
    ("constraint/improved", "Improvement ratio", "share of the responses"),
    ("reward/group_std", "Spread within groups", "std of the rewards"),
    ("evaluation/pass@1", "Held-out accuracy", "pass@1"),
)


@dataclass(frozen=True)
class Line:
    """The runs of one constraint."""

    name: str
    color: str
    runs: list[RecordedRun]

    def of(self, metric: str) -> tuple[list[int], list[float], list[float], list[float]]:
        """The steps at which all runs with the metric have it, and its smoothed mean, minimum and maximum there."""
        found = [run.of(metric) for run in self.runs]
        each = [dict(zip(steps, smooth(values), strict=True)) for steps, values in found if steps]
        steps = sorted(set.intersection(*map(set, each))) if each else []
        columns = [[points[step] for points in each] for step in steps]
        return steps, [fmean(c) for c in columns], [min(c) for c in columns], [max(c) for c in columns]


def lines_of(folders: list[Path]) -> list[Line]:
    """The lines, in the order of their first runs."""
    runs = [read(Path(folder)) for folder in folders]
    options = [run.recipe.get("constraint") or {} for run in runs]
    etas = {each.get("eta") for each in options if each.get("kind") == "dynamic"}
    joined: dict[str, list[RecordedRun]] = {}
    for run, each in zip(runs, options, strict=True):
        joined.setdefault(_name(each, len(etas) > 1), []).append(run)
    more = iter(MORE_COLORS * len(joined))
    return [Line(name, KIND_COLORS.get(name) or next(more), runs) for name, runs in joined.items()]


def _name(options: dict, several: bool) -> str:
    """The constraint's name, with the options that distinguish it from the others."""
    kind = options.get("kind", "the algorithm's own")
    if kind != "dynamic":
        return kind
    details = [f"eta {options['eta']:g}"] if several else []
    details += [] if options.get("filter", True) else ["no filter"]
    details += ["in the reward"] if options.get("mode") == "reward" else []
    return ", ".join([kind, *details])


def draw(folders: list[Path], path: Path) -> Path:
    """Draw the figure into `path`. Raises UserError if a folder holds no run."""
    lines = lines_of(folders)
    panels = [panel for panel in PANELS if any(line.of(panel[0])[0] for line in lines)]
    columns = 2 if len(panels) == 4 else min(len(panels), 3) or 1
    rows = max(-(-len(panels) // columns), 1)
    figure = Figure(figsize=(4.6 * columns, 3.3 * rows + 0.4), layout="constrained", dpi=120)
    for number, (metric, title, unit) in enumerate(panels, start=1):
        axes = figure.add_subplot(rows, columns, number)
        _draw(axes, lines, metric)
        axes.set_title(title, fontsize=10.5, fontweight="bold", loc="left")
        axes.set(xlabel="step", ylabel=unit)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    handles = [(line.name, axes.plot([], [], color=line.color, label=line.name)[0]) for line in lines] if panels else []
    figure.legend([each for _, each in handles], [name for name, _ in handles], loc="outside lower center", ncols=6)
    figure.savefig(path)
    return path


def _draw(axes: Axes, lines: list[Line], metric: str) -> None:
    for line in lines:
        steps, means, lowest, highest = line.of(metric)
        axes.plot(steps, means, color=line.color, linewidth=1.6)
        if len(line.runs) > 1:
            axes.fill_between(steps, lowest, highest, color=line.color, alpha=0.18, linewidth=0)
