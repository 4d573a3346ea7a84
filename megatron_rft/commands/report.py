"""`megatron-rft report`: writes a page about runs, with charts and samples, or serves it and follows the runs."""

import argparse
import contextlib
from pathlib import Path

from megatron_rft import report
from megatron_rft.report import server, status
from megatron_rft.utils.errors import FINISHED


def run(args: argparse.Namespace) -> int:
    if args.serve:
        return serve(args.runs, args.port)
    out = args.out or (args.runs[0] / "report" if len(args.runs) == 1 else Path("report"))
    print(report.write(args.runs, out))
    return FINISHED


def serve(runs: list[Path], port: int) -> int:
    """Serve the page until Ctrl-C."""
    for folder in runs:
        status.lines(folder)  # raises if the folder has no run
    serving, url = server.start(runs, port)
    address = f"{server.ADDRESS}:{serving.server_address[1]}"
    print(f"{url}\nCtrl-C ends it. To open it on another machine: ssh -L {address}:{address} HOST", flush=True)
    with contextlib.suppress(KeyboardInterrupt), serving:
        serving.serve_forever()
    return FINISHED
