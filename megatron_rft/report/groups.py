"""Groups runs that differ only in their seed, and computes means and standard errors over seeds."""

import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, stdev
from typing import Any

from megatron_rft.report.runs import RecordedRun

MOST_POINTS = 400  # of a curve; longer runs are shown as means over bins of steps
# Options that do not make a different experiment
IGNORED = ("run.output_dir", "run.name", "run.seed", "run.resume", "tracking.", "checkpoint.")


@dataclass(frozen=True)
class Series:
    """A metric at the steps of a group: mean over seeds and its standard error (None for a single seed)."""

    mean: list[float | None]
    error: list[float | None] | None


@dataclass(frozen=True)
class RunGroup:
    name: str
    runs: list[RecordedRun]

    @cached_property
    def width(self) -> int:
        return max(math.ceil(max(run.steps for run in self.runs) / MOST_POINTS), 1)

    @cached_property
    def bins(self) -> list[int]:
        """The indices of the bins of steps for which any run has a record; step 0 has its own bin."""
        return sorted({self._bin(record["step"]) for run in self.runs for record in run.records})

    def _bin(self, step: int) -> int:
        return -(-step // self.width)

    @cached_property
    def steps(self) -> list[float]:
        """The step in the middle of each bin."""
        return [number * self.width - (self.width - 1) / 2 if number else 0 for number in self.bins]

    @cached_property
    def metrics(self) -> list[str]:
        """The names of all metrics, in the order of the files."""
        return list(dict.fromkeys(name for run in self.runs for record in run.records for name in record))

    def has(self, name: str) -> bool:
        return any(run.of(name)[0] for run in self.runs)

    def series(self, name: str) -> Series:
        """Return one metric. Evaluations of a single run have the standard error from its metrics file."""
        absent = 0.0 if name.startswith("seconds/") else None  # a step without a phase spent no time in it
        over_seeds = self._over_seeds(lambda run: zip(*run.of(name, absent), strict=True))
        if len(self.runs) == 1 and self.has(f"{name}_se"):
            return Series(over_seeds.mean, self.series(f"{name}_se").mean)
        return over_seeds

    def so_far(self, name: str) -> list[float | None]:
        """Return the cumulative sum of a metric."""

        def sums(run: RecordedRun):
            total = 0.0
            for record in run.records:
                total += record.get(name) or 0.0
                yield record["step"], total

        return self._over_seeds(sums).mean

    def _over_seeds(self, points: Callable[[RecordedRun], Any]) -> Series:
        of_runs = [self._binned(points(run)) for run in self.runs]
        found = [mean_and_error([run[number] for run in of_runs if number in run]) for number in self.bins]
        errors = [error for _, error in found]
        return Series([mean for mean, _ in found], None if all(error is None for error in errors) else errors)

    def _binned(self, points: Any) -> dict[int, float]:
        sums: dict[int, list[float]] = {}
        for step, value in points:
            sums.setdefault(self._bin(step), []).append(value)
        return {number: sum(values) / len(values) for number, values in sums.items()}


def mean_and_error(values: list[float]) -> tuple[float | None, float | None]:
    """Return the mean and its standard error, std / sqrt(n), where std has n - 1 degrees of freedom."""
    if not values:
        return None, None
    return fmean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def grouped(runs: list[RecordedRun]) -> list[RunGroup]:
    """Group runs, in the order given. A second run with the same seed forms another group."""
    groups: dict[tuple, list[RecordedRun]] = {}
    for run in runs:
        key, again = identity(run), 0
        while any(other.seed == run.seed for other in groups.get((key, again), ())):
            again += 1
        groups.setdefault((key, again), []).append(run)
    many = [sorted(group, key=lambda run: run.seed) for group in groups.values()]
    return [RunGroup(name, group) for name, group in zip(names(many), many, strict=True)]


def identity(run: RecordedRun) -> tuple:
    """Return a key that is equal for runs that differ only in their seed. A run without a recipe has a unique key."""
    if not run.recipe:
        return (str(run.folder),)
    options = sorted(run.options.items())
    return tuple((key, repr(relative(run, value))) for key, value in options if not key.startswith(IGNORED))


def relative(run: RecordedRun, value: Any) -> Any:
    """Make a path next to the run's folder relative to it, because each seed may have its own folder."""
    home = os.path.dirname(os.path.normpath(run.options.get("run.output_dir", "")))
    if isinstance(value, str) and home and value.startswith(home + os.sep):
        return os.path.relpath(value, os.path.join(home, "run"))
    return value


def differing(groups: list[RunGroup]) -> list[tuple[str, list[Any]]]:
    """Return (option, its value in each group) for every option in which groups differ."""
    first = [group.runs[0] for group in groups]
    keys = sorted({key for run in first for key in run.options if not key.startswith(IGNORED)})
    rows = [(key, [relative(run, run.options.get(key)) for run in first]) for key in keys]
    return [(key, values) for key, values in rows if any(value != values[0] for value in values)]


def names(groups: list[list[RecordedRun]]) -> list[str]:
    """Return names that differ between groups: the methods, the runs' names, their folders, or the parts of the first
    folders' paths that the others do not share."""
    for name in (_method, _run_name, _folder_name):
        named = [name(group) for group in groups]
        if (len(groups) > 1 or name is not _method) and len(set(named)) == len(named) and all(named):
            return named
    folders = [group[0].folder.resolve() for group in groups]
    shared = os.path.commonpath([folder.parent for folder in folders])
    return [os.path.relpath(folder, shared) for folder in folders]


def _method(group: list[RecordedRun]) -> str:
    recipe = group[0].recipe
    algorithm = recipe.get("algorithm") or {}
    name = str(algorithm.get("name") or "")
    name = str(algorithm.get("objective")).rpartition(":")[2] if name == "own" else name
    constraint = (recipe.get("constraint") or {}).get("kind")
    parts = [name.replace("_", " ").upper() if len(name) < 6 else name.replace("_", " ")]
    parts += ["PIPO"] * bool(recipe.get("pipo")) + [f"{constraint} constraint"] * (constraint in ("static", "dynamic"))
    return " + ".join(parts)


def _run_name(group: list[RecordedRun]) -> str:
    found = {run.recipe.get("run", {}).get("name") for run in group}
    return str(found.pop()) if len(found) == 1 and None not in found else ""


def _folder_name(group: list[RecordedRun]) -> str:
    """Return the common name of the folders: `pipo` for pipo-seed0 and pipo-seed1, or for seed0/pipo and seed1/pipo."""
    folders = [run.folder.resolve().name for run in group]
    if len(set(folders)) == 1:
        return folders[0]
    return re.sub(r"[\s._-]*(seed)?[\s._-]*\d*$", "", os.path.commonprefix(folders))
