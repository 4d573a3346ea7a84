"""Writes the HTML page, page.html. Its script, page.js, draws charts and samples in the browser from data in the page.

The page loads nothing, and its content security policy forbids it.
"""

import math
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader

from megatron_rft import __version__
from megatron_rft.report.groups import RunGroup, differing, grouped
from megatron_rft.report.runs import read_all
from megatron_rft.utils.errors import UserError

HERE = Path(__file__).parent
TEMPLATES = Environment(loader=FileSystemLoader(HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True)
TEMPLATES.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
CHARTS = [{"log": False, "floor": None} | chart for chart in yaml.safe_load((HERE / "charts.yaml").read_text())]
MOST_LINES = 24  # recorded steps with samples on the page, over all runs


def write(folders: list[Path], out: Path) -> Path:
    """Write `out`/report.html about the runs in `folders`. Returns its path.

    Raises:
        UserError: a folder contains no run, no run has a finished step, or `out` cannot be written.
    """
    runs, notices = read_all(folders)
    path = out / "report.html"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(html(grouped(runs), notices), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out: {path} cannot be written: {error.strerror}") from None
    return path


def html(groups: list[RunGroup], notices: list[str]) -> str:
    return TEMPLATES.get_template("page.html").render(
        title=" / ".join(group.name for group in groups[:4]) + (" ..." if len(groups) > 4 else ""),
        notices=notices,
        groups=groups,
        differing=differing(groups),
        made=f"megatron-rft {__version__}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        style=(HERE / "page.css").read_text(encoding="utf-8"),
        script=(HERE / "page.js").read_text(encoding="utf-8"),
        data=data(groups),
    )


def as_yaml(value: Any) -> str:
    return "–" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def recipe(group: RunGroup) -> str:
    return yaml.safe_dump(group.runs[0].recipe, sort_keys=False, allow_unicode=True, width=100)


def data(groups: list[RunGroup]) -> dict[str, Any]:
    """Return the data that page.js draws."""
    return {
        "groups": [group_data(group) for group in groups],
        "charts": [{"id": re.sub("[^a-z]+", "_", chart["title"].lower())} | chart for chart in shown(groups)],
        "phases": phases(groups),
        "samples": samples(groups),
    }


def shown(groups: list[RunGroup]) -> list[dict[str, Any]]:
    """Return the charts that have data. The loss is left out if there are rewards, because the loss of a policy
    gradient does not measure progress."""
    with_data = {name for chart in CHARTS for name in chart["lines"][:1] if any(group.has(name) for group in groups)}
    left_out = "policy/loss" if "reward/mean" in with_data else None
    return [chart for chart in CHARTS if chart["lines"][0] in with_data - {left_out}]


def phases(groups: list[RunGroup]) -> list[str]:
    """Return the metrics of the phases of a step, sorted by their share of the time, the longest first."""
    total: dict[str, float] = {}
    for group in groups:
        names = sorted(name for name in group.metrics if name.startswith("seconds/") and name != "seconds/step")
        for run in group.runs:
            whole = sum(run.of("seconds/step")[1]) or 1.0
            for name in names:
                total[name] = total.get(name, 0.0) + sum(run.of(name)[1]) / whole
    return sorted(total, key=total.get, reverse=True)


def group_data(group: RunGroup) -> dict[str, Any]:
    return {
        "name": group.name,
        "seeds": len(group.runs),
        "bin": group.width,
        "x": {
            "steps": group.steps,
            "hours": [short(None if s is None else s / 3600) for s in group.so_far("seconds/step")],
            "tokens": [short(None if t is None else t / 1e6) for t in group.so_far("tokens/generated")],
        },
        "metrics": {name: metric(group, name) for name in group.metrics if name not in ("step", "time")},
    }


def metric(group: RunGroup, name: str) -> dict[str, Any]:
    series = group.series(name)
    found = {"mean": [short(value) for value in series.mean]}
    return found if series.error is None else found | {"error": [short(value) for value in series.error]}


def short(value: float | None) -> float | None:
    """Round to five digits, which are enough for a chart."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")


def samples(groups: list[RunGroup]) -> list[dict[str, Any]]:
    """Return the samples of each run's first and last recorded steps, and of some between them."""
    runs = [(group, run) for group in groups for run in group.runs if run.samples]
    per_run = max(MOST_LINES // len(runs), 2) if runs else 0
    names = [group.name + (f", seed {run.seed}" if len(group.runs) > 1 else "") for group, run in runs]
    return [{"run": name, "steps": evenly(run.samples, per_run)} for name, (_, run) in zip(names, runs, strict=True)]


def evenly(many: list, count: int) -> list:
    if len(many) <= count:
        return many
    return [many[round(i * (len(many) - 1) / (count - 1))] for i in range(count)]


TEMPLATES.filters |= {"as_yaml": as_yaml, "recipe": recipe}
