"""A page about one or several runs, in one file without references, and its charts as pictures. Needs no torch."""

from pathlib import Path

from megatron_rft.report import page, pictures
from megatron_rft.report.groups import grouped
from megatron_rft.report.runs import read_all


def write(folders: list[Path], out: Path) -> list[Path]:
    """`out`/report.html, and `out`/report.png with all charts, each alone in `out`/charts. The page comes first.

    Raises:
        UserError: a folder holds no run, none of them has a finished step, or `out` cannot be written.
    """
    runs, notices = read_all(folders)
    groups = grouped(runs)
    return page.write(groups, notices, out) + pictures.write(groups, out)
