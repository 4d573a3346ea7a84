"""The folder of a run, which one process claims before any model is built. No torch."""

import os
from contextlib import suppress
from pathlib import Path

from megatron_rft.config import Recipe, difference, dump, load_saved
from megatron_rft.utils.checkpoint_files import latest
from megatron_rft.utils.errors import ConfigError
from megatron_rft.utils.files import write_atomically

RECIPE_FILE = "recipe.yaml"
BESIDE = {"launch", "diagnosis"}  # folders in a run's folder that do not make it one


def claim_folder(recipe: Recipe, writes: bool = True) -> None:
    """Create the run's folder, or claim it for resuming, and write the resolved recipe into it; not `writes`: only
    check. Raises ConfigError: the folder holds another recipe's run or other files; with run.resume=never: a run; with
    run.resume=must: nothing to resume."""
    folder = Path(recipe.run.output_dir)
    stored, mode = folder / RECIPE_FILE, recipe.run.resume
    if mode == "must" and not (stored.is_file() and (recipe.trainer == "generate" or latest(folder / "checkpoints"))):
        raise ConfigError(f"run.resume is 'must', and there is nothing to resume in run.output_dir {folder}")
    if stored.is_file():
        if mode == "never":
            raise ConfigError(f"run.output_dir {folder} holds a run and run.resume is 'never': choose another folder")
        if begun(folder) and (changed := difference(load_saved(stored), recipe)):
            moved = "; for what was only moved, make a link at its old path" * any("/" in each for each in changed)
            raise ConfigError(
                f"run.output_dir {folder} holds another run; this one differs in {', '.join(changed)}. "
                f"Choose another run.output_dir, or undo these changes to resume it{moved}"
            )
    elif folder.is_dir() and (others := sorted(p.name for p in folder.iterdir() if p.name not in BESIDE)):
        raise ConfigError(f"run.output_dir {folder} holds other files ({', '.join(others[:3])} ...): choose another")
    if writes:
        write_atomically(stored, dump(recipe))  # the workers of `generate` share a folder and read this file


def begun(folder: Path) -> bool:
    """Whether a run in the folder got further than being refused at its start. Other processes may be active there (a
    generating worker, the writer of a killed start); files that they delete meanwhile do not count."""
    for path, folders, files in os.walk(folder):
        if Path(path) == folder:
            folders[:] = set(folders) - BESIDE - {"engines"}
            files = set(files) - {RECIPE_FILE}
        for name in files:
            with suppress(FileNotFoundError):
                if Path(path, name).stat().st_size:
                    return True
    return False
