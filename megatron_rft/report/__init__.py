"""Writes a report on one or more runs: a self-contained HTML page. Imports no torch."""

from pathlib import Path

from megatron_rft.report import page
from megatron_rft.report.groups import grouped
from megatron_rft.report.runs import read_all


def write(folders: list[Path], out: Path) -> Path:
    """Write `out`/report.html. Returns its path.

    Raises:
        UserError: a folder contains no run, no run has a finished step, or `out` cannot be written.
    """
    runs, notices = read_all(folders)
    return page.write(grouped(runs), notices, out)
