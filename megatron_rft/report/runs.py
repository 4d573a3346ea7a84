"""Reads the files in a run's folder, also while it runs, or after a kill in the middle of a line."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from megatron_rft.config.resume import flat
from megatron_rft.tracking.metrics import METRICS_FILE, NOTES_FILE, SAMPLES_FILE, read_metrics
from megatron_rft.utils.errors import UserError, did_you_mean
from megatron_rft.utils.files import read_json_lines

RECIPE = "recipe.yaml"


@dataclass(frozen=True)
class RecordedRun:
    folder: Path
    recipe: dict[str, Any]
    records: list[dict[str, Any]]  # the metrics of each step
    samples: list[dict[str, Any]] = field(default_factory=list)
    alarms: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.recipe.get("run", {}).get("name") or self.folder.name

    @cached_property
    def options(self) -> dict[str, Any]:
        """The recipe's options, by dotted name."""
        return flat(self.recipe)

    @property
    def seed(self) -> int:
        return self.options.get("run.seed", 0)

    @property
    def steps(self) -> int:
        return max((record["step"] for record in self.records), default=0)

    @property
    def metrics(self) -> dict[str, list[float | None]]:
        """The records as a table: for each metric a value of each record, None where it has none.
        `pandas.DataFrame(run.metrics)` is one."""
        names = dict.fromkeys(name for record in self.records for name in record)
        return {name: [record.get(name) for record in self.records] for name in names}

    @property
    def episodes(self) -> list[dict[str, Any]]:
        """The recorded samples of several turns, each with its `step`."""
        samples = [{"step": line["step"]} | sample for line in self.samples for sample in line["samples"]]
        return [sample for sample in samples if sample.get("turns")]

    def of(self, name: str, absent: float | None = None) -> tuple[list[int], list[float]]:
        """Return the metric's steps and values, without null, which stands for NaN. `absent`: the value elsewhere."""
        points = [(each["step"], value) for each in self.records if (value := each.get(name, absent)) is not None]
        return [step for step, _ in points], [value for _, value in points]


def read_all(folders: list[Path]) -> tuple[list[RecordedRun], list[str]]:
    """Return the runs that have steps, and notices about the others.

    Raises:
        UserError: a folder contains no run, is given twice, or no run has a step.
    """
    paths = [Path(folder).resolve() for folder in folders]
    if twice := [path for path in paths if paths.count(path) > 1]:
        raise UserError(f"{twice[0]} is given twice")
    found = [read(folder) for folder in folders]
    runs, empty = [run for run in found if run.records], [run for run in found if not run.records]
    notices = [f"{run.folder} has no finished step yet: its {METRICS_FILE} has no complete line." for run in empty]
    if not runs:
        raise UserError(f"there is nothing to report: {' '.join(notices)}")
    kinds = sorted({str(run.recipe.get("trainer", "unknown")) for run in runs})
    if len(kinds) > 1:
        notices.append(f"Runs of different kinds ({', '.join(kinds)}): a chart shows the runs that have its metric.")
    return runs, notices


def read(folder: str | Path) -> RecordedRun:
    """Read the run in a folder. Raises UserError if there is none."""
    folder = Path(folder)
    if not (folder / METRICS_FILE).is_file():
        raise UserError(_no_run(folder))
    try:
        recipe = yaml.safe_load((folder / RECIPE).read_text(encoding="utf-8"))
    except OSError:
        recipe = {}  # metrics alone can be shown
    except yaml.YAMLError as error:
        raise UserError(f"{folder / RECIPE} is not valid YAML: {error}") from None
    recipe = recipe if isinstance(recipe, dict) else {}
    alarms = [line["note"] for line in read_json_lines(folder / NOTES_FILE) if line.get("alarm")]
    samples = read_json_lines(folder / SAMPLES_FILE)
    return RecordedRun(folder, recipe, read_metrics(folder / METRICS_FILE), samples, alarms)


def _no_run(folder: Path) -> str:
    if not folder.exists():
        beside = [str(path) for path in folder.parent.glob("*") if path.is_dir()] if folder.parent.is_dir() else []
        return f"there is no folder {folder}.{did_you_mean(str(folder), beside)}"
    if (folder / "index.json").is_file():
        return f"{folder} is a store of trajectories, not the folder of a run: it has no {METRICS_FILE}"
    inside = sorted(str(path.parent) for path in folder.glob(f"*/{METRICS_FILE}"))
    hint = f". There are runs in it: {' '.join(inside[:8])}" if inside else ""
    return f"{folder} is not the folder of a run: it has no {METRICS_FILE}{hint}"
