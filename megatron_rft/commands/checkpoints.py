"""`megatron-rft checkpoints RUN`: lists a run's checkpoints, and compares them with their digests."""

import argparse
from datetime import datetime
from pathlib import Path

from megatron_rft.utils.checkpoint_files import DAMAGED, DIGESTS, PARTIAL, complete, damage
from megatron_rft.utils.errors import FAILED, FINISHED, DataError


def run(args: argparse.Namespace) -> int:
    """Returns FAILED if `--verify` finds that all checkpoints are damaged."""
    folder = args.run / "checkpoints"
    if not folder.is_dir():
        raise DataError(f"{args.run} has no checkpoints: give the output folder of a run")
    problems = {path: damage(path) if args.verify else None for path in complete(folder)}
    for path, problem in problems.items():
        intact = "intact" if (path / DIGESTS).exists() else "not checked: it has no digests"
        told = {None: "", "": intact}.get(problem, f"DAMAGED: {problem}")
        print(f"{_line(path)}  {told}".rstrip())
    for path in sorted([*folder.glob(f"*{DAMAGED}"), *folder.glob(f"*{PARTIAL}")]):
        print(f"{_line(path)}  not used")
    return FAILED if problems and all(problems.values()) else FINISHED


def _line(path: Path) -> str:
    when = datetime.fromtimestamp(path.stat().st_mtime).strftime("%Y-%m-%d %H:%M")
    size = sum(file.stat().st_size for file in path.iterdir())
    return f"{path.name:<20} {size / 2**30:9.3f} GiB  {when}"
