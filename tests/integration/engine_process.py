"""The engine process of this process."""

import os
from contextlib import suppress
from pathlib import Path

from megatron_rft.utils.end_with_parent import children

ENGINES = (b"megatron_rft.inference.process_worker", b"megatron_rft.utils.processes")  # the other: around a server


def engine() -> int:
    """An engine process that this process started, or that a server of it started."""
    return innermost(next(pid for pid in children(os.getpid()) if is_engine(pid)))


def is_engine(pid: int) -> bool:
    """Whether it is an engine's process or a server's, also one that was forked (tests/fork_server.py)."""
    with suppress(OSError):  # it has ended
        process = Path(f"/proc/{pid}")
        command, name = ((process / each).read_bytes() for each in ("cmdline", "comm"))
        return name.strip() == b"process_worker" or any(part in command for part in ENGINES)
    return False


def innermost(pid: int) -> int:
    found = children(pid)
    return innermost(found[-1]) if found else pid
