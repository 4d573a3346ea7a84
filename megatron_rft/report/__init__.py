"""Writes a report on one or more runs: a self-contained HTML page, and its charts as PNG files. Imports no torch."""

from pathlib import Path

from megatron_rft.report import page, pictures
from megatron_rft.report.groups import grouped
from megatron_rft.report.runs import read_all


def write(folders: list[Path], out: Path) -> list[Path]:
    """Write `out`/report.html, `out`/report.png with all charts, and each chart in `out`/charts. Returns the paths, the
    page first.

    Raises:
        UserError: a folder contains no run, no run has a finished step, or `out` cannot be written.
    """
    runs, notices = read_all(folders)
    groups = grouped(runs)
    return [page.write(groups, notices, out), *pictures.write(groups, out)]
