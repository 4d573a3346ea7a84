"""`megatron-rft train --nproc N` on a machine whose clock jumps: it is ahead by the seconds in the file CLOCK."""

import os
import sys
import time
from pathlib import Path

from megatron_rft.commands import main
from megatron_rft.commands.parser import parse
from megatron_rft.config import load
from megatron_rft.launching import ranks

now = time.time


def jumped() -> float:
    ahead = Path(os.environ["CLOCK"])
    return now() + (float(ahead.read_text()) if ahead.exists() else 0.0)


def launch(script: str) -> int:
    """As `megatron-rft train` does, but with ranks that run `script`."""
    args = parse()
    recipe = load(args.recipe, args.overrides)
    command = [sys.executable, script, "train", args.recipe, *args.overrides]
    os.makedirs(recipe.run.output_dir, exist_ok=True)
    return ranks.launch(command, args.nproc, recipe.run.output_dir, faults=recipe.faults)


if __name__ == "__main__":
    time.time = jumped
    sys.exit(main.main() if "RANK" in os.environ else launch(__file__))
