"""A run's checkpoints as files: which there are, and whether each is as it was written. Imports no torch.

checkpoints/step_000040/            complete: renamed after everything is on the disk
    digests.json                    {"name": {"bytes": 123, "sha256": "..."}, ...} of every other file
checkpoints/step_000040.*.partial/  being written, or left by a killed start, which the next start removes
checkpoints/step_000060.damaged/    a digest differed when a run wanted to resume from it
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from megatron_rft.utils.files import write_atomically

DIGESTS = "digests.json"
PARTIAL, DAMAGED = ".partial", ".damaged"


def complete(folder: Path) -> list[Path]:
    """The checkpoints of a run's `checkpoints` folder, oldest first."""
    return sorted(p for p in folder.glob("step_*") if not p.suffix and (p / "run.json").is_file())


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint. Its digests are not read."""
    return found[-1] if (found := complete(folder)) else None


def has_digests(folder: Path) -> bool:
    return (folder / DIGESTS).exists()


def digests(paths: Iterable[Path]) -> dict[str, dict]:
    found = {}
    for path in paths:
        with path.open("rb") as file:
            found[path.name] = {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
    return found


def write_own_digests(folder: Path, rank: int) -> None:
    """Digests of the shards that `rank` has written, for `join_digests`."""
    content = digests(sorted(folder.glob(f"__{rank}_*.distcp")))
    write_atomically(folder / f"digests_{rank}.json", json.dumps(content))


def join_digests(folder: Path) -> None:
    """Write digests.json from the ranks' own, and read the files that no rank has read."""
    known: dict[str, dict] = {}
    for path in folder.glob("digests_*.json"):
        known |= json.loads(path.read_text())
        path.unlink()
    known |= digests(path for path in sorted(folder.iterdir()) if path.name not in known)
    write_atomically(folder / DIGESTS, json.dumps(known, indent=1))


def damage(folder: Path, share: int = 0, shares: int = 1) -> str:
    """What is wrong with a checkpoint; empty if nothing is. Each of `shares` processes reads its share of the files.

    A checkpoint without digests was written by an older version, and nothing is known to be wrong with it.
    """
    if not has_digests(folder):
        return ""
    try:
        known = json.loads((folder / DIGESTS).read_text())
    except (OSError, ValueError):
        return f"{DIGESTS} cannot be read"
    for name, expected in sorted(known.items())[share::shares]:
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if (size := path.stat().st_size) != expected["bytes"]:
            return f"{name} has {size} bytes instead of {expected['bytes']}"
        if digests([path])[name] != expected:
            return f"{name} has other content than was written"
    return ""


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint, so that it does not count any more."""
    aside = folder.with_name(folder.name + DAMAGED)
    shutil.rmtree(aside, ignore_errors=True)
    os.replace(folder, aside)
    return aside


def size(folder: Path) -> int:
    """Bytes of all files."""
    return sum(path.stat().st_size for path in folder.iterdir())
