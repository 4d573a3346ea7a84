"""The run in one picture: small panels over steps, each drawn only when the run has its metric. Needs no torch."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_rft.tracking.metrics import read_metrics

# Okabe and Ito's colours, told apart by colour-blind readers too
BLUE, ORANGE, GREEN, RED, PURPLE, SKY, YELLOW, GREY = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#F0E442",
    "#777777",
)


@dataclass(frozen=True)
class Curves:
    """A run's metrics, by name."""

    records: list[dict[str, Any]]

    def has(self, *names: str) -> bool:
        """Any of them, at any step."""
        return any(record.get(name) is not None for record in self.records for name in names)

    def of(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and values where there is one: evaluations are rarer than steps, and null stands for NaN."""
        points = [(record["step"], record[name]) for record in self.records if record.get(name) is not None]
        return [step for step, _ in points], [value for _, value in points]

    @staticmethod
    def seconds(record: dict[str, Any], phases: list[str]) -> float:
        return sum(record.get(name) or 0.0 for name in phases)

    @property
    def phases(self) -> list[str]:
        """Phases by total seconds, the longest first."""
        names = {name for record in self.records for name in record if name.startswith("seconds/")} - {"seconds/step"}
        total = {name: sum(self.seconds(record, [name]) for record in self.records) for name in sorted(names)}
        return sorted(total, key=total.get, reverse=True)


def smooth(values: list[float]) -> list[float]:
    """Mean over a centred window of a tenth of the run, cut off at both ends: it does not lag behind."""
    half = len(values) // 20
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def plot_noisy(axes: Axes, curves: Curves, name: str, label: str, color: str) -> None:
    """The values, faint, under their moving mean; few values are drawn as they are."""
    steps, values = curves.of(name)
    if len(values) < 20:
        axes.plot(steps, values, color=color, label=label, marker="o", markersize=3, linewidth=1.2)
        return
    axes.plot(steps, values, color=color, alpha=0.25, linewidth=0.8)
    axes.plot(steps, smooth(values), color=color, label=label, linewidth=1.7)


def draw_reward(axes: Axes, curves: Curves) -> None:
    plot_noisy(axes, curves, "reward/mean", "mean", BLUE)
    for name, label, color in (("right", "groups all right", GREEN), ("wrong", "groups all wrong", RED)):
        if curves.has(f"reward/all_{name}_groups"):
            plot_noisy(axes, curves, f"reward/all_{name}_groups", label, color)


def draw_accuracy(axes: Axes, curves: Curves) -> None:
    steps, values = curves.of("evaluation/pass@1")
    errors = [record.get("evaluation/pass@1_se") or 0.0 for record in curves.records if record["step"] in set(steps)]
    axes.errorbar(steps, values, yerr=errors, color=BLUE, marker="o", markersize=4, capsize=3, linewidth=1.5)
    for i in sorted({0, len(steps) - 1}):
        axes.annotate(
            f"{values[i]:.2f}", (steps[i], values[i] + errors[i]), (0, 5), textcoords="offset points", ha="center"
        )
    axes.margins(x=0.08, y=0.2)


def draw_kl(axes: Axes, curves: Curves) -> None:
    plot_noisy(axes, curves, "policy/kl", "policy to reference", BLUE)


def draw_mismatch(axes: Axes, curves: Curves) -> None:
    plot_noisy(axes, curves, "mismatch/kl", "engine to trainer", ORANGE)


def draw_pipo(axes: Axes, curves: Curves) -> None:
    steps, values = curves.of("pipo/xi")
    axes.bar(
        steps, values, width=1.0, color=[GREEN if value >= 0 else RED for value in values], alpha=0.55, linewidth=0
    )
    axes.plot(*curves.of("pipo/phi"), color="black", linewidth=1.0, label=r"$\varphi(\xi)$")
    axes.axhline(0, color=GREY, linewidth=0.6)
    axes.bar(0, 0, color=GREEN, alpha=0.55, label=r"$\xi \geq 0$: reinforced")
    axes.bar(0, 0, color=RED, alpha=0.55, label=r"$\xi < 0$: suppressed")


def draw_length(axes: Axes, curves: Curves) -> None:
    plot_noisy(axes, curves, "response/length_mean", "mean", PURPLE)
    if curves.has("response/length_max"):
        plot_noisy(axes, curves, "response/length_max", "longest", GREY)


def draw_loss(axes: Axes, curves: Curves) -> None:
    plot_noisy(axes, curves, "policy/loss", "policy", BLUE)


def draw_entropy(axes: Axes, curves: Curves) -> None:
    plot_noisy(axes, curves, "policy/entropy", "policy", SKY)


def draw_gradient(axes: Axes, curves: Curves) -> None:
    for name, color in (("policy", BLUE), ("verification", ORANGE)):
        if curves.has(f"{name}/grad_norm"):
            plot_noisy(axes, curves, f"{name}/grad_norm", name, color)


def draw_seconds(axes: Axes, curves: Curves, most_bins: int = 40) -> None:
    """Means over bins of steps, so that a long run keeps its totals and stays readable."""
    phases = curves.phases
    shown = phases if len(phases) <= 7 else phases[:6]
    timed = [record for record in curves.records if record.get("seconds/step") is not None]
    width = -(-len(timed) // most_bins)
    bins = [timed[i : i + width] for i in range(0, len(timed), width)]
    parts = {name.removeprefix("seconds/"): [name] for name in shown} | {"the rest": phases[len(shown) :]}
    bottom = [0.0] * len(bins)
    steps = [(many[0]["step"] + many[-1]["step"]) / 2 for many in bins]
    colors = (BLUE, ORANGE, GREEN, SKY, PURPLE, YELLOW, RED, GREY)
    for (label, names), color in zip(parts.items(), colors, strict=False):
        if names:
            heights = [sum(curves.seconds(record, names) for record in many) / len(many) for many in bins]
            axes.bar(steps, heights, bottom=bottom, width=width, color=color, label=label, alpha=0.85)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_ylim(0, max(bottom) * 1.45)  # room for the legend


@dataclass(frozen=True)
class PanelSpec:
    title: str
    unit: str  # of the vertical axis
    metric: str  # the panel is there when the run has this one
    draw: Callable[[Axes, Curves], None]
    floor: float | None = None  # the vertical axis begins here


PANELS = (
    PanelSpec("Reward", "verifier reward, share of groups", "reward/mean", draw_reward),
    PanelSpec("Held-out accuracy", "pass@1 ± standard error", "evaluation/pass@1", draw_accuracy),
    PanelSpec("Loss", "per token or sequence", "policy/loss", draw_loss),
    PanelSpec("KL divergence", "nats per token", "policy/kl", draw_kl),
    PanelSpec("Engine against trainer", "KL, nats per token", "mismatch/kl", draw_mismatch, floor=0),
    PanelSpec("PIPO feedback", r"$\xi$, standard deviations", "pipo/xi", draw_pipo),
    PanelSpec("Response length", "tokens", "response/length_mean", draw_length, floor=0),
    PanelSpec("Entropy", "nats per token", "policy/entropy", draw_entropy),
    PanelSpec("Gradient norm", "before clipping", "policy/grad_norm", draw_gradient, floor=0),
    PanelSpec("Time per step", "seconds, by phase", "seconds/step", draw_seconds),
)


def panels_of(curves: Curves) -> list[PanelSpec]:
    """The loss of a policy gradient says nothing to look at; without rewards it is the curve that matters."""
    present = [panel for panel in PANELS if curves.has(panel.metric)]
    return [panel for panel in present if panel.title != "Loss" or not curves.has("reward/mean")]


def draw(run_dir: Path, name: str | None = None) -> Path:
    """Draw RUN/metrics.jsonl into RUN/curves.png, under the run's name (None: the folder's)."""
    run_dir = Path(run_dir)
    curves = Curves(read_metrics(run_dir / "metrics.jsonl"))
    panels = panels_of(curves)
    columns = min(len(panels), 4 if len(panels) in (4, 7, 8) else 3) or 1
    rows = max(-(-len(panels) // columns), 1)
    figure = Figure(figsize=(4.2 * columns, 3.1 * rows + 0.4), layout="constrained", dpi=130)
    steps = [record["step"] for record in curves.records]
    figure.suptitle(f"{name or run_dir.resolve().name}: {max(steps, default=0)} steps", fontsize=13, fontweight="bold")
    for place, panel in enumerate(panels):
        axes = figure.add_subplot(rows, columns, place + 1)
        panel.draw(axes, curves)
        finish(axes, panel)
        if place >= len(panels) - columns:
            axes.set_xlabel("step")
    path = run_dir / "curves.png"
    figure.savefig(path)
    return path


def finish(axes: Axes, panel: PanelSpec) -> None:
    axes.set_title(panel.title, fontsize=10.5, fontweight="bold", loc="left")
    axes.set_ylabel(panel.unit, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if panel.floor is not None:
        axes.set_ylim(bottom=panel.floor)
    if len(axes.get_legend_handles_labels()[1]) > 1:
        many = len(axes.get_legend_handles_labels()[1]) > 4
        place = {"loc": "upper center", "ncols": 3, "columnspacing": 1.0} if many else {"loc": "best"}
        axes.legend(fontsize=7.5, framealpha=0.75, borderpad=0.3, labelspacing=0.25, **place)
