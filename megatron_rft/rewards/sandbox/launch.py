"""Starting a sandbox's server in the strongest container that works on this machine.

    bubblewrap   bwrap builds the container: its own network (empty), processes, users, and a read-only root that
                 holds the interpreter and the system's libraries alone
    namespaces   the same container, built by our own system calls (inside/container.py)
    none         no container: limits and the filter of system calls remain, but programs can read this user's files

In every case root becomes the user nobody, and each program is a cell of its own (inside/cell.py).
"""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

INSIDE = Path(__file__).parent / "inside"
MODES = ("bubblewrap", "namespaces")
START_S, LEAVE_S = 60.0, 10.0  # on a busy machine
SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/etc/ld.so.cache")
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONUTF8": "1",
    "PYTHONHASHSEED": "0",  # rewards that depend on the order of a set are the same in every run
    "MALLOC_ARENA_MAX": "1",  # else each thread reserves address space that counts
    "OPENBLAS_NUM_THREADS": "1",
}


class SandboxError(Exception):
    """The sandbox failed, not the program in it."""


class Server:
    """One running server process, and our end of the socket to it."""

    def __init__(self, mode: str):
        self.mode = mode
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._errors = os.memfd_create("errors")
        fd = theirs.fileno()
        try:
            self.process = subprocess.Popen(
                command(mode, fd),
                env=ENVIRONMENT,
                pass_fds=[fd],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                start_new_session=True,
                cwd="/",
            )
        finally:
            theirs.close()
        if self.receive(START_S) != b"ready":
            words = self._last_words()
            self.close()
            raise SandboxError(f"{mode}: {words}")

    def receive(self, timeout_s: float) -> bytes:
        """The next message; b"" where the server is gone or silent."""
        self.socket.settimeout(timeout_s)
        try:
            return self.socket.recv(4096)
        except OSError:
            return b""

    def close(self) -> None:
        """The server leaves when its socket closes; every cell dies with the container, before this returns."""
        self.socket.close()
        try:
            self.process.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self._errors)

    def _last_words(self) -> str:
        lines = os.pread(self._errors, 1 << 16, 0).decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "the server ended without a word"


def command(mode: str, fd: int) -> list[str]:
    python = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    folders = [str(INSIDE), *(path for path in {sys.base_prefix, sys.base_exec_prefix} if path.split("/")[1] != "usr")]
    server = [python, "-s", "-S", "-B", str(INSIDE / "server.py"), mode, str(fd), *folders]
    return [*_bubblewrap(folders), *server] if mode == "bubblewrap" else server


def _bubblewrap(folders: list[str]) -> list[str]:
    program = shutil.which("bwrap") or "bwrap"  # by its whole path: the server's environment has a PATH of its own
    args = [program, "--die-with-parent", "--new-session", "--unshare-net", "--unshare-ipc", "--unshare-pid"]
    args += ["--unshare-uts", "--unshare-cgroup-try"]
    # Root needs no user namespace to build the container, and leaves its rights once inside.
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
    """One line for a person."""
    user = "the user nobody" if os.geteuid() == 0 else "this user"
    if mode == "none":
        return (
            f"no container: resource limits and a filter of system calls, as {user}: THEY CAN READ THIS MACHINE'S FILES"
        )
    how = "bubblewrap" if mode == "bubblewrap" else "namespaces of this package's making"
    return f"{how}: no network, no files, no processes but their own, resource limits, system-call filter, as {user}"
