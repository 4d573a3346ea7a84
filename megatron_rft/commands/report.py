"""`megatron-rft report`: a page about runs, with charts and samples."""

import argparse
from pathlib import Path

from megatron_rft import report
from megatron_rft.utils.exit_codes import FINISHED


def run(args: argparse.Namespace) -> int:
    out = args.out or (args.runs[0] / "report" if len(args.runs) == 1 else Path("report"))
    page, picture, *charts = report.write(args.runs, out)
    print(f"{page}\n{picture} ({len(charts)} charts, each alone in {out / 'charts'})")
    return FINISHED
