"""`megatron-rft status RUN`: prints step, phase of each rank, rates, time left, evaluation, checkpoints and alarms.

It only reads files, so it works on a login node.
"""

import argparse
import time

from megatron_rft.report import status
from megatron_rft.utils.errors import FINISHED

EVERY_S = 2.0
CLEAR = "\x1b[H\x1b[J"


def run(args: argparse.Namespace) -> int:
    """Print the status; with `--watch` repeat until the run ends or Ctrl-C."""
    try:
        while True:
            found = status.lines(args.run)
            print((CLEAR if args.watch else "") + "\n".join(found), flush=True)
            if not args.watch or status.ended(args.run):
                return FINISHED
            time.sleep(EVERY_S)
    except KeyboardInterrupt:
        return FINISHED
