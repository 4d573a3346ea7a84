"""Processes that must not outlive the one that started them, and ports for them to meet at."""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
NANNY = (sys.executable, "-m", "megatron_rft.processes")  # + the pid of who starts it, + a command


def die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """The kernel signals this process when `parent`, which started it, is gone, whatever ended it. Linux only."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it died before the call
        os.kill(os.getpid(), number)


def nanny(parent: int, command: list[str]) -> int:
    """Run a command of somebody else's, which starts processes of its own, and leave none of them behind: not when it
    ends, not on SIGTERM, not when `parent` is gone. Returns its status."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans among them become this process's children
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    child = None
    try:
        die_with(parent, signal.SIGTERM)
        child = subprocess.Popen(command)
        return child.wait()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while found := children(os.getpid()):
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for pid in found:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)


def reserved_port(host: str = "127.0.0.1") -> socket.socket:
    """A free port of `host`, an address of this machine ("": all of them), that nobody else is given while this socket
    is open. It does not listen: on Linux a server that sets SO_REUSEADDR, as they all do, can be told to."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((host, 0))
    return held


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task")
    return [int(child) for task in tasks.glob("*/children") for child in task.read_text().split()]


if __name__ == "__main__":
    sys.exit(nanny(int(sys.argv[1]), sys.argv[2:]))
