"""Starts a sandbox's server in one of three modes of isolation.

    bubblewrap   bwrap builds the container: separate processes and users, no network, and a read-only root with only
                 the interpreter and the system's libraries
    namespaces   the same container, built by our own system calls (inside/container.py)
    none         no container: resource limits and a system-call filter only; programs can read this user's files

In every mode root becomes the user nobody, and each program runs in a separate cell (inside/cell.py).
"""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from megatron_rft.utils.processes import start_helper

INSIDE = Path(__file__).parent / "inside"
MODES = ("bubblewrap", "namespaces")
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

    def __init__(self, mode: str):
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._errors = os.memfd_create("errors")
        with theirs:
            self.process = start_helper(
                command(mode, theirs.fileno()),
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
            raise SandboxError(f"{mode}: {lines[-1] if lines else 'the server ended without a message'}")

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


def command(mode: str, fd: int) -> list[str]:
    python = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    folders = [str(INSIDE), *(path for path in {sys.base_prefix, sys.base_exec_prefix} if path.split("/")[1] != "usr")]
    server = [python, "-s", "-S", "-B", str(INSIDE / "server.py"), mode, str(fd), *SYSTEM, *folders]
    return [*_bubblewrap(folders), *server] if mode == "bubblewrap" else server


def _bubblewrap(folders: list[str]) -> list[str]:
    program = shutil.which("bwrap") or "bwrap"  # the full path, because the server's environment has another PATH
    args = [program, "--die-with-parent", "--new-session", "--unshare-net", "--unshare-ipc", "--unshare-pid"]
    args += ["--unshare-uts", "--unshare-cgroup-try"]
    # Root needs no user namespace to build the container, and drops its rights inside.
    args += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"] if os.geteuid() == 0 else ["--unshare-user"]
    for path in SYSTEM:
        if os.path.islink(path):
            args += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            args += ["--ro-bind", path, path]
    for folder in folders:
        for parent in reversed(Path(folder).parents[:-1]):
            args += ["--perms", "0755", "--dir", str(parent)]
        args += ["--ro-bind", folder, folder]
    args += ["--dev", "/dev", "--proc", "/proc", "--perms", "0755", "--dir", "/tmp", "--remount-ro", "/dev"]
    args += ["--remount-ro", "/"]
    return args


def describe(mode: str) -> str:
    """Return one line about a mode's isolation, for the log."""
    user = "the user nobody" if os.geteuid() == 0 else "this user"
    if mode == "none":
        return (
            f"no container: resource limits and a filter of system calls, as {user}: THEY CAN READ THIS MACHINE'S FILES"
        )
    how = "bubblewrap" if mode == "bubblewrap" else "namespaces made by this package"
    return f"{how}: no network, no files or processes of this machine, resource limits, system-call filter, as {user}"
