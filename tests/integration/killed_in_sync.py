"""Runs `megatron-rft` and kills an engine process in the middle of each sync in the environment variable KILL_IN_SYNCS
("2 5"). With a server, it kills the server's engine."""

import os
import signal
import sys
from contextlib import suppress
from itertools import count
from pathlib import Path

from megatron_rft.commands import main
from megatron_rft.megatron.actor import Actor
from megatron_rft.utils.processes import children

ENGINES = (b"megatron_rft.inference.process_worker", b"megatron_rft.utils.processes")  # the other: around a server
syncs, stream = count(), Actor.stream


def engine() -> int:
    """Of those that this process started, or of a server that it started."""
    pids = children(os.getpid())
    return innermost(next(pid for pid in pids if any(part in name(pid) for part in ENGINES)))


def name(pid: int) -> bytes:
    with suppress(OSError):  # it has ended
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def innermost(pid: int) -> int:
    found = children(pid)
    return innermost(found[-1]) if found else pid


def killing(actor):
    last = next(syncs) in map(int, os.environ["KILL_IN_SYNCS"].split())
    for number, pair in enumerate(stream(actor)):
        if last and number == 5:
            os.kill(engine(), signal.SIGKILL)
        yield pair


Actor.stream = killing
sys.exit(main.main())
