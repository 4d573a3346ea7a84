"""Runs `megatron-rft` and kills it with -9 while rank 1 writes its part of the checkpoint of step KILL_IN_SAVE: half of
the file is there. The launcher dies, and all ranks with it."""

import os
import signal
import sys
from pathlib import Path

from megatron_rft.commands import main
from megatron_rft.launching.ranks import PARENT
from megatron_rft.megatron.optimizer_shards import Shards

write = Shards.write


def killing(shards: Shards, path: Path) -> None:
    if os.environ["RANK"] != "1" or not path.parent.name.startswith(os.environ["KILL_IN_SAVE"]):
        return write(shards, path)
    whole = path.with_suffix(".whole")
    write(shards, whole)
    half = whole.read_bytes()[: whole.stat().st_size // 2]
    whole.unlink()
    path.with_suffix(".new").write_bytes(half)
    os.kill(int(os.environ[PARENT]), signal.SIGKILL)
    signal.pause()


Shards.write = killing
sys.exit(main.main())
