"""Starts a sandbox's server, in a container or without one.

The container (inside/container.py) has separate processes and users, no network, and a read-only root with only the
interpreter and the system's libraries. Without it there are resource limits and a system-call filter only, and programs
can read this user's files. In both cases root becomes the user nobody, and each program runs in a separate cell
(inside/cell.py).
"""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from megatron_rft.utils.processes import start_helper

INSIDE = Path(__file__).parent / "inside"
COMPILE_ERROR, CALL_LATE = 90, (signal.SIGPROF, signal.SIGALRM)  # exit statuses of inside/program.py
START_TIMEOUT_S, EXIT_TIMEOUT_S = 60.0, 10.0  # enough for a busy machine
SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/etc/ld.so.cache")
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONUTF8": "1",
    "PYTHONHASHSEED": "0",  # makes rewards that depend on the order of a set reproducible
    "MALLOC_ARENA_MAX": "1",  # else each thread reserves address space, which counts against the memory limit
    "OPENBLAS_NUM_THREADS": "1",
}


class SandboxError(Exception):
    """The sandbox failed, not the program in it."""


class Server:
    """A running server process and this process's end of the socket to it."""

    def __init__(self, contained: bool):
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._errors = os.memfd_create("errors")
        with theirs:
            self.process = start_helper(
                command(contained, theirs.fileno()),
                env=ENVIRONMENT,
                pass_fds=[theirs.fileno()],
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                umask=0o022,  # the user nobody reads the container's folders
                cwd="/",
            )
        if self.receive(START_TIMEOUT_S) != b"ready":
            lines = os.pread(self._errors, 1 << 16, 0).decode(errors="replace").strip().splitlines()
            self.close()
            raise SandboxError(lines[-1] if lines else "the server ended without a message")

    def receive(self, timeout_s: float) -> bytes:
        """Return the next message, or b"" if the server has ended or sends nothing in time."""
        self.socket.settimeout(timeout_s)
        try:
            return self.socket.recv(4096)
        except OSError:
            return b""

    def close(self) -> None:
        """Close the socket, which makes the server exit. All cells have ended when this returns."""
        self.socket.close()
        try:
            self.process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self._errors)


def command(contained: bool, fd: int) -> list[str]:
    python = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    folders = [str(INSIDE), *(path for path in {sys.base_prefix, sys.base_exec_prefix} if path.split("/")[1] != "usr")]
    return [python, "-s", "-S", "-B", str(INSIDE / "server.py"), str(fd), *([*SYSTEM, *folders] if contained else [])]


def describe(contained: bool) -> str:
    """Return one line about the isolation, for the log."""
    user = "the user nobody" if os.geteuid() == 0 else "this user"
    if contained:
        return f"a container without network, files or processes of this machine, with limits, as {user}"
    return f"no container: resource limits and a filter of system calls, as {user}: THEY CAN READ THIS MACHINE'S FILES"
