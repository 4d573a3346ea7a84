"""Ends child processes with their parent, removes the shared memory that they leave, and reserves free ports."""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
SHARED = ("/dev/shm/psm_", "/dev/shm/vllm_dist_")
REAPER = (sys.executable, "-m", "megatron_rft.utils.processes")  # followed by the parent's pid and a command


def die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Make the kernel signal this process when `parent`, which started it, ends for any reason. Linux only."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # the parent ended before the call
        os.kill(os.getpid(), number)


def reaper(parent: int, command: list[str]) -> int:
    """Run a command, and kill all processes that it started when it ends, on SIGTERM, and when `parent` ends. Returns
    the command's status. Removes vLLM's shared memory that these processes used."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphaned grandchildren become this process's children
    signal.signal(signal.SIGTERM, _leave)
    try:
        die_with(parent, signal.SIGTERM)
        return subprocess.Popen(command).wait()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        shared: set[str] = set()
        while found := children(os.getpid()):
            shared |= {path for pid in found for path in shared_memory(pid)}
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for pid in found:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)
        for path in shared:
            with contextlib.suppress(OSError):
                os.unlink(path)


def shared_memory(pid: int) -> set[str]:
    """Paths of vLLM's shared memory that a process has mapped: Python's, and that of its ranks on CPUs."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
        return {path for line in lines if (path := line.partition("/")[1] + line.partition("/")[2]).startswith(SHARED)}
    return set()


def _leave(number: int, _frame: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second signal must not interrupt the cleanup
    sys.exit(128 + number)


def reserved_port(host: str = "127.0.0.1") -> socket.socket:
    """Bind a free port of `host`, an address of this machine ("": all of them). The kernel gives it to no other process
    while the returned socket is open. On Linux a server that sets SO_REUSEADDR can still listen on it."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((host, 0))
    return reserved


def children(pid: int) -> list[int]:
    """Return the pids of the children, including zombies. Scans all processes, because the kernel lists children by
    thread, and the list of threads changes."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # the process has just ended
            if folder.name.isdigit() and parent_of(folder) == pid:
                found.append(int(folder.name))
    return sorted(found)


def parent_of(folder: Path) -> int:
    """Return the parent's pid. `folder`: that of a process under /proc."""
    return int((folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])


if __name__ == "__main__":
    sys.exit(reaper(int(sys.argv[1]), sys.argv[2:]))
