"""A cell: one process for one piece of code, which holds nothing but what it was given, and ends with everything in it.

It is process 1 of a PID namespace of its own: when it ends, or is ended, the kernel ends whatever it started. It has a
user namespace without capabilities, a private empty /tmp, no /proc, read-only files and a filter of system calls.
"""

import fcntl
import json
import os
import random
import resource
import signal
import socket
import sys
import time

import kernel
import program
import tester

NAMESPACES = kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWIPC
PROCESSES, FILES, STACK = 64, 64, 64 << 20  # threads count as processes
PATIENCE = 3  # times the clock's limit that a cell may have waited for a processor
PAYLOAD, CHANNEL = 3, 4  # file descriptors of an inmate, after the standard three


class Cell:
    """A running cell, as the server sees it."""

    def __init__(self, order: dict, fds: list[int], control: socket.socket):
        self.number, self.start, self.wall_s = order["id"], time.monotonic(), order["wall_s"]
        self.deadline, self.late = self.start + self.wall_s, False
        self.built, told = os.pipe()
        user = os.getuid(), os.getgid()
        self.pid = kernel.clone(NAMESPACES) if order["isolated"] else os.fork()
        if self.pid == 0:
            control.close()
            _inmate(order, user, fds, told)
        os.close(told)
        self.pidfd = os.pidfd_open(self.pid)

    def is_late(self) -> bool:
        """By the clock, less the time that it waited for a processor: on a busy machine no program is to blame."""
        if time.monotonic() >= self.deadline:
            self.deadline = self.start + self.wall_s + min(self._waited(), PATIENCE * self.wall_s)
            self.late = time.monotonic() >= self.deadline
        return self.late

    def _waited(self) -> float:
        """Seconds ready to run, but not running (proc(5): schedstat)."""
        try:
            with open(f"/proc/{self.pid}/schedstat") as file:
                return int(file.read().split()[1]) / 1e9
        except (OSError, IndexError):
            return 0.0

    def end(self) -> dict:
        """Stop it if it runs still. `code` (negative: the signal), `timeout`, `cpu_s`, `seconds`; or `error`, where the
        cell could not be built, which is nobody's fault but ours."""
        signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        _, status, usage = os.wait4(self.pid, 0)  # the kernel lets it end only after everything in its namespace has
        told = os.read(self.built, 1000)
        os.close(self.built)
        os.close(self.pidfd)
        if told != b"1":
            return {"id": self.number, "error": told.decode() or "the cell ended before it was built"}
        return {
            "id": self.number,
            "code": os.waitstatus_to_exitcode(status),
            "timeout": self.late,
            "cpu_s": usage.ru_utime + usage.ru_stime,
            "seconds": time.monotonic() - self.start,
        }


def _inmate(order: dict, user: tuple[int, int], fds: list[int], told: int) -> None:
    """Never returns."""
    status = 1
    try:
        fds = [fcntl.fcntl(fd, fcntl.F_DUPFD, 16) for fd in [*fds, told]]  # clear of the numbers that they will get
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
        told = len(fds) - 1
        os.closerange(len(fds), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        try:
            _enclose(order, user)
            os.write(told, b"1")
        except Exception as error:
            os.write(told, f"{type(error).__name__}: {error}".encode())
            os._exit(1)
        os.close(told)
        status = _work(order)
    except BaseException as error:
        sys.stderr.write(repr(error))
    finally:
        program.leave(status)


def _enclose(order: dict, user: tuple[int, int]) -> None:
    """From here on nothing can be reached that was not handed in."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    if order["isolated"]:
        kernel.map_own_user(*user)
        _private_files(order["disk"])
    _limit(order)
    kernel.drop_capabilities()
    if kernel.can_filter():
        kernel.filter_system_calls()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    random.seed(0)


def _private_files(disk: int) -> None:
    """An empty /tmp that goes with the cell, and no /proc. New user namespaces, with rights in them, are forbidden."""
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmp", "/tmp", "tmpfs", flags | kernel.MS_NOEXEC, f"size={disk},nr_inodes=1000,mode=700")
    with open("/proc/sys/user/max_user_namespaces", "w") as file:
        file.write("0")
    kernel.mount("none", "/proc", "tmpfs", flags | kernel.MS_RDONLY, "size=4k,nr_inodes=2")
    os.chdir("/tmp")


def _limit(order: dict) -> None:
    for limit, value in (
        (resource.RLIMIT_AS, order["memory"]),
        (resource.RLIMIT_CPU, order["cpu_s"]),
        (resource.RLIMIT_FSIZE, order["output"]),
        (resource.RLIMIT_STACK, STACK),
        (resource.RLIMIT_NPROC, PROCESSES),
        (resource.RLIMIT_NOFILE, FILES),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))


def _work(order: dict) -> int:
    with os.fdopen(PAYLOAD, "rb") as file:
        text = file.read().decode("utf-8", "surrogatepass")
    if order["role"] == "script":
        return program.run_script(text)
    channel = socket.socket(fileno=CHANNEL)
    if order["role"] == "module":
        return program.serve(text, channel, order["test_s"])
    return tester.main(json.loads(text), channel, output=1)
