"""`megatron-rft report`: writes a page about runs, with charts and samples."""

import argparse
from pathlib import Path

from megatron_rft.report import page
from megatron_rft.utils.errors import FINISHED


def run(args: argparse.Namespace) -> int:
    out = args.out or (args.runs[0] / "report" if len(args.runs) == 1 else Path("report"))
    print(page.write(args.runs, out))
    return FINISHED
