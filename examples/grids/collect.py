"""Makes a paper's table from finished runs: numbers, errors (over seeds, else the evaluation's), [paper's].

Reads evaluation/export/results.json and metrics.jsonl, which runs and `megatron-rft evaluate` write.
"""

import math
from pathlib import Path
from statistics import fmean, stdev

from examples.grids.grid import Column, Row, Run, Table
from megatron_rft.utils.files import read_json, read_json_lines

Value = tuple[float, float]  # a number and its standard error, in the table's unit
MISSING, NOT_REACHED = "missing", "not reached"


def table(asked: Table) -> str:
    """The table in Markdown, a row per method, and the missing runs."""
    columns = asked.columns
    lines = [f"{asked.content['title']} ({asked.model}). Ours ± standard error, in brackets the paper's.", ""]
    lines += ["| " + " | ".join(["method", *(column.name for column in columns)]) + " |"]
    lines += ["|" + "---|" * (len(columns) + 1)]
    for row in asked.rows:
        of_seeds = [_values(asked, row, seed) for seed in asked.seeds(row)]
        cells = [_cell([values[number] for values in of_seeds], column) for number, column in enumerate(columns)]
        paper = row.cells(asked.model)
        cells = [_beside(cell, paper[number] if paper else "-") for number, cell in enumerate(cells)]
        lines.append("| " + " | ".join([row.method, *cells]) + " |")
    return "\n".join([*lines, *_notes(asked)]) + "\n"


def _beside(cell: str, paper: str) -> str:
    return cell if paper == "-" else f"{cell} ({paper})"


def _values(asked: Table, row: Row, seed: int) -> list[Value | None]:
    """The values of one seed, one per column; None if missing."""
    values: list[Value | None] = []
    since: list[Value | None] = []
    for column in asked.columns:
        if column.kind == "mean":
            values.append(mean(since))
            since = []
        else:
            since.append(_value(asked, asked.run(row, column.domain, seed), column))
            values.append(since[-1])
    return values


def _value(asked: Table, run: Run, column: Column) -> Value | None:
    if column.kind == "hours":
        return hours(run.folder)
    if column.kind == "hours_to":
        return hours_to(run.folder, column.accuracy)
    if column.kind == "held_out":
        return held_out(run.folder)
    found = results(run.folder / "evaluation" / asked.evaluation)
    parts = [found[part] for part in column.parts if part in found]
    return joined(parts, asked.content.get("metric", "pass@1")) if parts else None


def results(folder: Path) -> dict[str, dict]:
    """The results by benchmark; empty without a finished evaluation."""
    return {each["name"]: each for each in read_json(folder / "results.json") or []}


def joined(parts: list[dict], metric: str) -> Value | None:
    """The accuracy over the problems of all parts, in %."""
    if metric == "pass@1":
        pairs = [(each["pass_at_1"], each["standard_error"], each["problems"]) for each in parts]
    else:  # a share of problems: the binomial error
        shares = [(each["pass_at_k"].get(metric.removeprefix("pass@")), each["problems"]) for each in parts]
        pairs = [(p, math.sqrt(p * (1 - p) / count), count) for p, count in shares if p is not None]
    if len(pairs) < len(parts) or any(mean is None for mean, _, _ in pairs):
        return None
    total = sum(count for _, _, count in pairs)
    mean = sum(mean * count for mean, _, count in pairs) / total
    return 100 * mean, 100 * math.sqrt(sum((error * count) ** 2 for _, error, count in pairs)) / total


def hours(folder: Path) -> Value | None:
    """The hours of all steps of a finished run, without its evaluations."""
    return (max(clock(metrics(folder)).values()), 0.0) if (folder / "export").is_dir() else None


def hours_to(folder: Path, accuracy: float) -> Value | None:
    """The hours until an evaluation of a finished run reaches `accuracy`, in %; infinite if none does."""
    lines = metrics(folder)
    if not (folder / "export").is_dir():
        return None
    reached = [line["step"] for line in lines if 100 * (line.get("evaluation/pass@1") or 0.0) >= accuracy]
    return clock(lines)[reached[0]] if reached else math.inf, 0.0


def clock(lines: list[dict]) -> dict[int, float]:
    """Hours since the start of training by step, without evaluations."""
    found, total = {0: 0.0}, 0.0
    for line in lines:
        if line["step"]:
            total += ((line.get("seconds/step") or 0.0) - (line.get("seconds/evaluation") or 0.0)) / 3600
            found[line["step"]] = total
    return found


def held_out(folder: Path) -> Value | None:
    """The best evaluation after the first step of a finished run, in %."""
    found = [line for line in metrics(folder) if line["step"] and line.get("evaluation/pass@1") is not None]
    if not found or not (folder / "export").is_dir():
        return None
    best = max(found, key=lambda line: line["evaluation/pass@1"])
    return 100 * best["evaluation/pass@1"], 100 * (best.get("evaluation/pass@1_se") or 0.0)


def metrics(folder: Path) -> list[dict]:
    return read_json_lines(folder / "metrics.jsonl")


def mean(values: list[Value | None]) -> Value | None:
    """The mean of independent values and its error; None if there is none, or one is missing."""
    if not values or None in values:
        return None
    return fmean(mean for mean, _ in values), math.sqrt(sum(error**2 for _, error in values)) / len(values)


def _cell(of_seeds: list[Value | None], column: Column) -> str:
    there = [value for value in of_seeds if value is not None]
    if not there:
        return MISSING
    means = [mean for mean, _ in there]
    few = f", {len(there)} of {len(of_seeds)} seeds" if len(there) < len(of_seeds) else ""
    if math.inf in means:
        return f"{NOT_REACHED}{few}"
    error = stdev(means) / math.sqrt(len(means)) if len(means) > 1 else there[0][1]
    timed = column.kind in ("hours", "hours_to")
    shown = f"{fmean(means):.1f}" if timed and not error else f"{fmean(means):.1f} ± {error:.1f}"
    return shown + few


def _notes(asked: Table) -> list[str]:
    """Notes on runs without results and benchmarks that no run evaluated."""
    runs = asked.all_runs()
    asks = bool(asked.parts)
    found = {run.folder: results(run.folder / "evaluation" / asked.evaluation) for run in runs}
    missing = [str(folder) for folder, there in found.items() if not (there if asks else metrics(folder))]
    lines = [f"Missing, {len(missing)} of {len(runs)} runs: {', '.join(missing)}"] if missing else []
    known = set().union(*found.values())
    absent = [part for column in asked.columns for part in column.parts if known and part not in known]
    lines += [f"No run was asked {', '.join(dict.fromkeys(absent))}: its column is of the rest."] if absent else []
    return ["", *lines] if lines else []
