"""Child processes that must not outlive their parent, and free ports."""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
REAPER = (sys.executable, "-m", "megatron_rft.utils.processes")  # + the pid of who starts it, + a command


def die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """The kernel signals this process when `parent`, which started it, is gone, whatever ended it. Linux only."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it died before the call
        os.kill(os.getpid(), number)


def reaper(parent: int, command: list[str]) -> int:
    """Run a command that starts processes of its own, and kill all of them when it ends, on SIGTERM, and when `parent`
    has ended. Returns its status."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphaned grandchildren become this process's children
    signal.signal(signal.SIGTERM, _leave)
    try:
        die_with(parent, signal.SIGTERM)
        return subprocess.Popen(command).wait()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while found := children(os.getpid()):
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for pid in found:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)


def _leave(number: int, _frame: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second signal must not interrupt the cleanup
    sys.exit(128 + number)


def reserved_port(host: str = "127.0.0.1") -> socket.socket:
    """A free port of `host`, an address of this machine ("": all of them), that nobody else is given while this socket
    is open. It does not listen: on Linux a server that sets SO_REUSEADDR, as they all do, can be told to."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((host, 0))
    return held


def children(pid: int) -> list[int]:
    """Pids of the children, zombies included. Read from the list of all processes, because the kernel lists children
    by thread, and threads come and go."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it is gone
            if folder.name.isdigit() and parent_of(folder) == pid:
                found.append(int(folder.name))
    return sorted(found)


def parent_of(folder: Path) -> int:
    """`folder`: a process's under /proc."""
    return int((folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])


if __name__ == "__main__":
    sys.exit(reaper(int(sys.argv[1]), sys.argv[2:]))
