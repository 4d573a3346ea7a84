"""Ends child processes with their parent, removes the shared memory that they leave, and reserves free ports."""

import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
SHARED = r"/dev/shm/(psm_|vllm_dist_|.*cpushm)"  # vLLM's: Python's, and that of its ranks on CPUs
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


def shared_memory(pid: int, pattern: str = SHARED) -> set[str]:
    """Paths that begin with `pattern` of files that a process has mapped and that still have a name."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
        paths = ("/" + line.partition("/")[2] for line in lines)
        return {path for path in paths if re.match(pattern, path) and not path.endswith(" (deleted)")}
    return set()


def status_fields(pid: int) -> list[str]:
    """What /proc/PID/stat has after the program's name, which may contain spaces: state, parent, ...; empty where there
    is no such process."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return []


def _leave(number: int, _frame: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second signal must not interrupt the cleanup
    sys.exit(128 + number)


def reserved_port(host: str = "127.0.0.1") -> socket.socket:
    """Bind a free port of `host`, an address of this machine. The kernel gives it to no other process while the
    returned socket is open. On Linux a server that sets SO_REUSEADDR can still listen on it."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((host, 0))
    return reserved


def children(pid: int) -> list[int]:
    """Return the pids of the children, including zombies. Scans all processes, because the kernel lists children by
    thread, and the list of threads changes."""
    every = (int(name) for name in os.listdir("/proc") if name.isdigit())
    return sorted(each for each in every if parent_of(each) == pid)


def parent_of(pid: int) -> int:
    """Return the parent's pid; 0 where there is no such process."""
    fields = status_fields(pid)
    return int(fields[1]) if fields else 0


def process_state(pid: int) -> str:
    """Return the letter of its state; empty where there is no such process."""
    return (status_fields(pid) or [""])[0]


def started(pid: int) -> str:
    """Return when a process was started; empty where there is none, or where it has ended."""
    fields = status_fields(pid)
    return fields[19] if fields and fields[0] != "Z" else ""


if __name__ == "__main__":
    sys.exit(reaper(int(sys.argv[1]), sys.argv[2:]))
