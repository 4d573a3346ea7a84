"""The state of a run in a few lines, from its files alone: it may be under way on other machines. No torch."""

import time
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron_rft.report.runs import METRICS_FILE, RECIPE, RecordedRun, read
from megatron_rft.tracking.metrics import NOTES_FILE
from megatron_rft.tracking.progress import PACE_STEPS, accuracy, clock_time, phase_seconds, shown, slow_rank
from megatron_rft.utils import run_lock
from megatron_rft.utils.checkpoint_files import complete
from megatron_rft.utils.files import read_json_lines
from megatron_rft.utils.position import read_nodes

FRESH_S = 30.0  # a node whose launcher has not written for longer does not run, or its clock is off
NOTES_SHOWN = 8


def lines(folder: Path, now: float | None = None) -> list[str]:
    """Raises UserError where `folder` is no run's."""
    now = time.time() if now is None else now
    holder = run_lock.holder(folder)
    lives = holder is not None and run_lock.alive(folder, holder)
    killed = f"{holder}, ended without saying why" if holder else "nothing runs here"
    state = [str(holder), *_nodes(folder, now)] if lives else [f"no process: {killed}. The same command resumes"]
    if not (folder / METRICS_FILE).is_file() and (folder / RECIPE).is_file() and (folder / "launch").is_dir():
        return [f"{folder}: no step has finished yet", *state]
    run = read(folder)
    export = folder / "export"  # of a run that goes on with more steps it is older than the last step
    finished = bool(run.records) and export.is_dir() and export.stat().st_mtime >= _last(run)["time"]
    state = [] if finished else state
    return [_head(run, finished, lives, now), *_numbers(run), *state, *_checkpoints(folder), *_notes(folder)]


def _last(run: RecordedRun) -> dict[str, Any]:
    return run.records[-1] if run.records else {"step": 0, "time": 0.0}


def _head(run: RecordedRun, finished: bool, lives: bool, now: float) -> str:
    last, total = _last(run), run.recipe.get("run", {}).get("steps")
    parts = [f"{run.name}: step {last['step']}" + (f" of {total}" if total else "")]
    if last["time"]:
        parts.append(f"its last step ended {clock_time(max(now - last['time'], 0))} ago")
    if finished:
        return ", ".join([*parts, "finished"])
    recent = [seconds for step, seconds in zip(*run.of("seconds/step"), strict=True) if step][-PACE_STEPS:]
    if lives and recent and total and last["step"] < total:
        pace = fmean(recent)  # not from `time`: the run may have stood still between two starts
        parts += [f"{pace:.1f} s per step", f"{clock_time(pace * (total - last['step']))} left"]
    return ", ".join(parts)


def _numbers(run: RecordedRun) -> list[str]:
    last = {name: value for name, value in _last(run).items() if value is not None}
    numbers = [f"{label} {number}" for label, number in shown(last)]
    rows = ["  ".join(numbers)] if numbers else []
    if seconds := phase_seconds(last):
        rows.append("seconds: " + ", ".join(f"{name} {value:.1f}" for name, value in seconds.items()))
    if slow := slow_rank(last):
        rows.append(slow)
    evaluated = [record for record in run.records if record.get("evaluation/pass@1") is not None]
    if evaluated:
        rows.append(f"last evaluation, step {evaluated[-1]['step']}: pass@1 {accuracy(evaluated[-1])}")
    return rows


def _nodes(folder: Path, now: float) -> list[str]:
    """The phase of each rank, and how long ago it moved."""
    rows = []
    for node in read_nodes(folder / "launch"):
        age = now - node["time"]
        if age > FRESH_S:
            rows.append(f"node {node['host']}: nothing heard for {clock_time(age)}")
            continue
        rows.append(f"node {node['host']}: {'STANDS STILL' if node['still'] else 'runs'}")
        for rank in node["ranks"]:
            still = f", has not moved for {rank['still_s']:.0f} s" if rank["still_s"] > 10 else ""
            rows.append(f"  rank {rank['rank']}: step {rank['step']}, {rank['phase']}{still}")
    return rows


def _checkpoints(folder: Path) -> list[str]:
    folder /= "checkpoints"
    names = [f"{path.name} ({datetime.fromtimestamp(path.stat().st_mtime):%H:%M})" for path in complete(folder)]
    damaged = [path.name for path in folder.glob("*.damaged")]
    return [f"checkpoints: {', '.join([*names, *damaged]) or 'none yet'}"]


def _notes(folder: Path) -> list[str]:
    notes = read_json_lines(folder / NOTES_FILE)[-NOTES_SHOWN:]
    return [f"{datetime.fromtimestamp(note['time']):%m-%d %H:%M} {note['note']}" for note in notes]
