"""The engine process of this process."""

import os
from contextlib import suppress
from pathlib import Path

from megatron_rft.utils.processes import children

ENGINES = (b"megatron_rft.inference.process_worker", b"megatron_rft.utils.processes")  # the other: around a server


def engine() -> int:
    """An engine process that this process started, or that a server of it started."""
    pids = children(os.getpid())
    return innermost(next(pid for pid in pids if any(part in name(pid) for part in ENGINES)))


def name(pid: int) -> bytes:
    with suppress(OSError):  # it has ended
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def innermost(pid: int) -> int:
    found = children(pid)
    return innermost(found[-1]) if found else pid
