"""Draws the dynamics of offline runs side by side, as figures 2, 3, 4, 5 and 8 of the FPA paper do:
`python examples/figures.py dynamics RUN ... --out FILE`. Needs no torch.

log-ratio       log pi(y|x) - log pi_ref(y|x) of right and of wrong trajectories
weight          the weight of each gradient: pi^(1/|y|), for FPA pi_hat^(1/|y|)
ratio           of wrong trajectories: pi_hat / pi within a run of FPA, and pi_hat of that run / pi of Off-RL's
damped          wrong trajectories of a batch whose weight is below 0.2
gradient norms  of the part of right and of the part of wrong trajectories
accuracy        on the held-out problems (or data.validation) over steps; over lambda the best of each run, its test
                accuracy, and its mean over the benchmarks of `megatron-rft evaluate`

Runs that differ only in their seed share a color and, over lambda, a point.
"""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from examples.drawing import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, SKY, smooth
from examples.grids.collect import mean, results
from megatron_rft.report.groups import grouped
from megatron_rft.report.runs import RecordedRun, read
from megatron_rft.utils.errors import DataError
from megatron_rft.utils.files import read_json

COLORS = (BLUE, RED, GREEN, ORANGE, PURPLE, SKY, GREY)
SIDES = (("correct", "-"), ("incorrect", "--"))


@dataclass(frozen=True)
class OfflineRun:
    name: str
    recorded: RecordedRun
    extrapolation: float | None  # lambda of FPA on all trajectories; Off-RL's is 0, other methods have none
    looks_ahead: frozenset[str] = frozenset()  # sides that are weighted by the predicted policy, pi_hat
    tested: tuple[float, float] | None = None  # pass@1 on data.test when it was finished, and its standard error
    average: tuple[float, float] | None = None  # the same of all benchmarks that `megatron-rft evaluate` measured

    @classmethod
    def of(cls, run: RecordedRun, name: str) -> "OfflineRun":
        algorithm = run.recipe.get("algorithm") or {"name": None}
        return cls(name, run, _extrapolation(algorithm), _looks_ahead(algorithm), _tested(run), _average(run))

    def weight(self, side: str) -> str:
        """The metric with the gradient weight of that side."""
        return f"{'future_weight' if side in self.looks_ahead else 'weight'}_{side}"

    @property
    def best(self) -> tuple[float, float] | None:
        """The best pass@1 on the held-out problems after the first step, and its standard error."""
        points = [
            (record["evaluation/pass@1"], record.get("evaluation/pass@1_se") or 0.0)
            for record in self.recorded.records
            if record["step"] and record.get("evaluation/pass@1") is not None
        ]
        return max(points, default=None)


def _extrapolation(algorithm: dict) -> float | None:
    if algorithm["name"] == "off_rl" and not algorithm.get("kl_coefficient"):
        return 0.0
    return algorithm.get("extrapolation") if algorithm.get("fpa_on", "both") == "both" else None


def _looks_ahead(algorithm: dict) -> frozenset[str]:
    if algorithm["name"] != "fpa":
        return frozenset()
    on = algorithm.get("fpa_on", "both")
    return frozenset({"correct", "incorrect"} if on == "both" else {on})


def _tested(run: RecordedRun) -> tuple[float, float] | None:
    found = [read_json(path) for path in sorted(run.folder.glob("evaluation/test_step_*/results.json"))]
    whole = [each[0] for each in found if each]
    if len(whole) < 2:  # only the start was tested
        return None
    return whole[-1]["pass_at_1"], whole[-1]["standard_error"]


def _average(run: RecordedRun) -> tuple[float, float] | None:
    found = results(run.folder / "evaluation/export").values()
    return mean([(r["pass_at_1"], r["standard_error"] or 0.0) for r in found if r["pass_at_1"] is not None])


def draw(folders: list[Path], path: Path) -> Path:
    """Draw one figure of all runs into `path`.

    Raises:
        UserError: a folder holds no run, or none of them is an offline run.
    """
    groups = grouped([read(Path(folder)) for folder in folders])
    runs = [OfflineRun.of(run, group.name) for group in groups for run in group.runs]
    if not any(name.startswith("dynamics/") for run in runs for record in run.recorded.records for name in record):
        raise DataError(
            f"no offline run is among {', '.join(map(str, folders))}: `megatron-rft report` draws all others"
        )
    figure = Figure(figsize=(15, 8), layout="constrained", dpi=130)
    places = figure.subplots(2, 4).flatten()
    panels = (
        ("Log-ratio to the reference", "nats per trajectory", _log_ratios),
        ("Weight of the gradient", "geometric mean probability", _weights),
        ("Predicted policy over present", "wrong trajectories", _ratios),
        ("Damped wrong trajectories", "below 0.2, per batch", _damped),
        ("Gradient norm of either part", "before clipping", _norms),
        ("Gradient norm", "before clipping", _norm),
        ("Held-out accuracy", "pass@1", _accuracy),
    )
    names = list(dict.fromkeys(run.name for run in runs))
    colors = {name: COLORS[number % len(COLORS)] for number, name in enumerate(names)}
    for axes, (title, unit, panel) in zip(places, panels, strict=False):
        for run in runs:
            panel(axes, run, colors[run.name])
        _dress(axes, title, unit, "step")
    _ratios_to_off_rl(places[2], runs, colors)
    _sweep(places[7], runs)
    _dress(places[7], r"Accuracy over $\lambda$", "pass@1", r"$\lambda$ (Off-RL: 0)")
    handles, labels = places[0].get_legend_handles_labels()
    shown = dict(zip(labels, handles, strict=True))
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=min(len(shown), 6), fontsize=8)
    figure.savefig(path)
    return path


def _dress(axes: Axes, title: str, unit: str, over: str) -> None:
    axes.set_title(title, fontsize=10.5, fontweight="bold", loc="left")
    axes.set_ylabel(unit, fontsize=9)
    axes.set_xlabel(over)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if not axes.has_data():
        axes.text(0.5, 0.5, "not measured by these runs", transform=axes.transAxes, ha="center", color=GREY)


def _line(axes: Axes, run: OfflineRun, metric: str, color: str, style: str = "-", label: str | None = None) -> None:
    steps, values = run.recorded.of(metric)
    if steps:
        axes.plot(steps, smooth(values), style, color=color, label=label, linewidth=1.5)


def _log_ratios(axes: Axes, run: OfflineRun, color: str) -> None:
    for side, style in SIDES:
        _line(axes, run, f"dynamics/log_ratio_{side}", color, style, f"{run.name}, {side}")


def _weights(axes: Axes, run: OfflineRun, color: str) -> None:
    for side, style in SIDES:
        _line(axes, run, f"dynamics/{run.weight(side)}", color, style)


def _ratios(axes: Axes, run: OfflineRun, color: str) -> None:
    _line(axes, run, "dynamics/future_ratio_incorrect", color)


def _ratios_to_off_rl(axes: Axes, runs: list[OfflineRun], colors: dict[str, str]) -> None:
    base = next((run for run in runs if run.extrapolation == 0), None)
    shared = [(run, ahead_of(base, run)) for run in runs] if base else []
    for run, points in shared:
        if points:
            steps, ratios = zip(*points, strict=True)
            axes.plot(steps, smooth(list(ratios)), ":", color=colors[run.name], linewidth=1.5)
    if any(points for _, points in shared):
        axes.plot([], [], "-", color=GREY, label="of the same run")
        axes.plot([], [], ":", color=GREY, label="over Off-RL's run")
        axes.legend(fontsize=7, frameon=False)


def ahead_of(base: OfflineRun, run: OfflineRun) -> list[tuple[int, float]]:
    """(step, weight of wrong trajectories under FPA over that under Off-RL), at the steps that both runs have (fpa.txt
    figure 2, right)."""
    if "incorrect" not in run.looks_ahead:
        return []
    weights = dict(zip(*base.recorded.of("dynamics/weight_incorrect"), strict=True))
    points = zip(*run.recorded.of("dynamics/future_weight_incorrect"), strict=True)
    return [(step, value / weights[step]) for step, value in points if weights.get(step)]


def _damped(axes: Axes, run: OfflineRun, color: str) -> None:
    _line(axes, run, f"dynamics/low_{run.weight('incorrect')}", color)


def _norms(axes: Axes, run: OfflineRun, color: str) -> None:
    for side, style in SIDES:
        _line(axes, run, f"dynamics/grad_norm_{side}", color, style)


def _norm(axes: Axes, run: OfflineRun, color: str) -> None:
    _line(axes, run, "policy/grad_norm", color)


def _accuracy(axes: Axes, run: OfflineRun, color: str) -> None:
    axes.plot(*run.recorded.of("evaluation/pass@1"), color=color, marker="o", markersize=3, linewidth=1.3)


def _sweep(axes: Axes, runs: list[OfflineRun]) -> None:
    found = sweep(runs)
    for (label, points), color, marker in zip(found.items(), (BLUE, ORANGE, GREEN), "os^", strict=False):
        places, means, errors = zip(*points, strict=True)
        axes.errorbar(places, means, yerr=errors, color=color, marker=marker, markersize=4, capsize=3, label=label)
    if found:
        places = sorted({place for points in found.values() for place, *_ in points})
        axes.set_xscale("symlog", linthresh=0.5)
        axes.set_xticks(places, [f"{place:g}" for place in places])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.legend(fontsize=7, frameon=False)


def sweep(runs: list[OfflineRun]) -> dict[str, list[tuple[float, float, float]]]:
    """(lambda, pass@1, standard error), a mean over the runs of each lambda: of their best evaluations on the held-out
    problems, of their tests, and of their means over benchmarks."""
    found: dict[str, dict[float, list]] = {name: defaultdict(list) for name in ("held-out, best", "test", "benchmarks")}
    for run in runs:
        for of, measured in zip(found.values(), (run.best, run.tested, run.average), strict=True):
            if run.extrapolation is not None and measured:
                of[run.extrapolation].append(measured)
    return {label: [(at, *_mean(of[at])) for at in sorted(of)] for label, of in found.items() if of}


def _mean(measured: list[tuple[float, float]]) -> tuple[float, float]:
    """(value, error) of each run -> the mean, and the standard error over runs; of a single run its own error."""
    values = [value for value, _ in measured]
    error = stdev(values) / len(values) ** 0.5 if len(values) > 1 else measured[0][1]
    return fmean(values), error
