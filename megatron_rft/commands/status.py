"""`megatron-rft status RUN`: prints step, phase of each rank, rates, time left, evaluation, checkpoints and alarms.

It only reads files, so it works on a login node.
"""

import argparse

from megatron_rft.report import status
from megatron_rft.utils.errors import FINISHED


def run(args: argparse.Namespace) -> int:
    print("\n".join(status.lines(args.run)))
    return FINISHED
