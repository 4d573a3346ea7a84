"""Lists the checkpoints in a run's folder and checks their files. Imports no torch.

checkpoints/step_000040/            a complete checkpoint: it gets this name when all of its files are on the disk
    digests.json                    size and SHA-256 of its other files: {"name": {"bytes": 123, "sha256": "..."}, ...}
checkpoints/step_000040.*.partial/  a checkpoint that is not complete; if a kill left it, the next start removes it
checkpoints/step_000060.damaged/    a checkpoint whose files differed from its digests when a run read it to resume
"""

import json
import os
import shutil
from pathlib import Path

from megatron_rft.utils.files import digest, read_json, write_atomically

DIGESTS = "digests.json"
PARTIAL, DAMAGED = ".partial", ".damaged"


def complete(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a run's `checkpoints` folder, the oldest first. They are what has a step's
    name; a copy step_000040_kept is the user's."""
    return sorted((p for p in folder.glob("step_*") if p.name[5:].isdecimal()), key=lambda path: int(path.name[5:]))


def latest(folder: Path) -> Path | None:
    """Return the newest complete checkpoint, without checking its files."""
    return found[-1] if (found := complete(folder)) else None


def write_own_digests(folder: Path, rank: int) -> None:
    """Write the digests of the shards that `rank` has written, for `join_digests`."""
    own = [*folder.glob(f"__{rank}_*.distcp"), *folder.glob(f"optimizer_{rank:05d}.safetensors")]
    write_atomically(folder / f"digests_{rank}.json", json.dumps({path.name: digest(path) for path in sorted(own)}))


def join_digests(folder: Path) -> None:
    """Write digests.json: the digests that the ranks have written, and those of all other files."""
    known: dict[str, dict] = {}
    for path in folder.glob("digests_*.json"):
        known |= json.loads(path.read_text())
        path.unlink()
    known |= {path.name: digest(path) for path in sorted(folder.iterdir()) if path.name not in known}
    write_atomically(folder / DIGESTS, json.dumps(known, indent=1))


def damage(folder: Path, share: int = 0, shares: int = 1) -> str:
    """Return what is wrong with a checkpoint, or an empty string. Each of `shares` processes reads its share of files.

    A checkpoint of an older version has no digests, and counts as intact.
    """
    if not (folder / DIGESTS).exists():
        return "" if (folder / "run.json").is_file() else "run.json is missing"
    if (known := read_json(folder / DIGESTS)) is None:
        return f"{DIGESTS} cannot be read"
    for name, expected in sorted(known.items())[share::shares]:
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if (size := path.stat().st_size) != expected["bytes"]:
            return f"{name} has {size} bytes instead of {expected['bytes']}"
        if digest(path) != expected:
            return f"{name} has other content than was written"
    return ""


def set_aside(folder: Path) -> None:
    """Rename a damaged checkpoint, so that no run resumes from it."""
    aside = folder.with_name(folder.name + DAMAGED)
    shutil.rmtree(aside, ignore_errors=True)
    os.replace(folder, aside)
