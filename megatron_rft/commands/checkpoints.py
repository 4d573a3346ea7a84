"""`megatron-rft checkpoints RUN`: lists a run's checkpoints, compares them with their digests, removes old ones."""

import argparse
import shutil
from datetime import datetime
from pathlib import Path

from megatron_rft.utils.checkpoint_files import DAMAGED, DIGESTS, PARTIAL, complete, damage
from megatron_rft.utils.errors import FAILED, FINISHED, DataError


def run(args: argparse.Namespace) -> int:
    """Returns FAILED if `--verify` or `--prune` finds that all checkpoints are damaged."""
    folder = args.run / "checkpoints"
    if not folder.is_dir():
        raise DataError(f"{args.run} has no checkpoints: give the output folder of a run")
    checkpoints = complete(folder)
    problems = {path: damage(path) for path in checkpoints} if args.verify or args.prune else {}
    for path in checkpoints:
        intact = "intact" if (path / DIGESTS).exists() else "not checked: it has no digests"
        told = {None: "", "": intact}.get(problems.get(path), f"DAMAGED: {problems.get(path)}")
        print(f"{_line(path)}  {told}".rstrip())
    for path in sorted([*folder.glob(f"*{DAMAGED}"), *folder.glob(f"*{PARTIAL}")]):
        print(f"{_line(path)}  not used")
    if args.prune:
        _prune(folder, [path for path in checkpoints if not problems[path]], args.prune)
    return FAILED if checkpoints and problems and all(problems.values()) else FINISHED


def _prune(folder: Path, intact: list[Path], keep: int) -> None:
    """Keep the newest `keep` intact checkpoints. Removes nothing if none is intact, and never a `*.partial`,
    which a run may be writing."""
    if not intact:
        print("nothing is removed: no checkpoint is intact")
        return
    stay = set(intact[-keep:])
    for path in sorted([*complete(folder), *folder.glob(f"*{DAMAGED}")]):
        if path not in stay:
            shutil.rmtree(path)
            print(f"removed {path.name}")


def _line(path: Path) -> str:
    when = datetime.fromtimestamp(path.stat().st_mtime).strftime("%Y-%m-%d %H:%M")
    size = sum(file.stat().st_size for file in path.iterdir())
    return f"{path.name:<20} {size / 2**30:9.3f} GiB  {when}"
