"""A cell: an isolated process for one piece of code, with nothing but the file descriptors that it was given.

It is process 1 of its own PID namespace: when it ends, the kernel kills all processes that it started. It has a user
namespace without capabilities, a private empty /tmp, no /proc, read-only files and a system-call filter.
"""

import fcntl
import json
import math
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
PAYLOAD, CHANNEL = 3, 4  # file descriptors in a cell, after the standard three
WAITED = 5  # of a module: its own schedstat, as a cell has no /proc


class Cell:
    """A running cell, seen from the server."""

    def __init__(self, order: dict, fds: list[int], control: socket.socket):
        self.role, self.wall_s, self.max_wait_s = order["role"], order["wall_s"], order["max_wait_s"]
        self.start = time.monotonic()
        self.deadline, self.late = self.start + self.wall_s, False
        self.built, built_writer = os.pipe()
        user = os.getuid(), os.getgid()
        self.pid = kernel.clone(NAMESPACES) if order["isolated"] else os.fork()
        if self.pid == 0:
            control.close()
            _run_cell(order, user, fds, built_writer)
        os.close(built_writer)
        self.pidfd = os.pidfd_open(self.pid)

    def is_late(self) -> bool:
        """Return whether the wall time, without the time spent waiting for a processor, exceeds the limit."""
        if time.monotonic() >= self.deadline:
            self.deadline = self.start + self.wall_s + min(self._waited(), self.max_wait_s)
            self.late = time.monotonic() >= self.deadline
        return self.late

    def _waited(self) -> float:
        """Return the seconds that the process was ready to run, but not running."""
        try:
            with open(f"/proc/{self.pid}/schedstat") as file:
                return program.waited(file.fileno())
        except OSError:
            return 0.0

    def end(self) -> dict:
        """Kill the process if it still runs, and return a report: `code` (negative: the signal), `timeout` and
        `cpu_s`, or `error` if the cell could not be built."""
        signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        _, status, usage = os.wait4(self.pid, 0)  # returns after all processes of the namespace have ended
        built = os.read(self.built, 1000)
        os.close(self.built)
        os.close(self.pidfd)
        if built != b"1":
            return {"role": self.role, "error": built.decode() or "the cell ended before it was built"}
        code, cpu_s = os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
        return {"role": self.role, "code": code, "timeout": self.late, "cpu_s": cpu_s}


def _run_cell(order: dict, user: tuple[int, int], fds: list[int], built: int) -> None:
    """Isolate this process and run the code. Writes b"1" or an error to `built`. Never returns."""
    status = 1
    try:
        own = [os.open("/proc/self/schedstat", os.O_RDONLY)] if order["role"] == "module" else []
        fds = [fcntl.fcntl(fd, fcntl.F_DUPFD, 16) for fd in [*fds, *own, built]]  # away from their final numbers
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
        built = len(fds) - 1
        os.closerange(len(fds), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        try:
            _isolate(order, user)
            os.write(built, b"1")
        except Exception as error:
            os.write(built, f"{type(error).__name__}: {error}".encode())
            os._exit(1)
        os.close(built)
        status = _work(order)
    except BaseException as error:
        sys.stderr.write(repr(error))
    finally:
        program.leave(status)


def _isolate(order: dict, user: tuple[int, int]) -> None:
    """Cut this process off from everything but its file descriptors."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    if order["isolated"]:
        kernel.map_own_user(*user)
        _private_files(order["disk_mb"] << 20)
    _limit(order)
    kernel.drop_capabilities()
    kernel.filter_system_calls()
    random.seed(0)


def _private_files(disk: int) -> None:
    """Mount an empty private /tmp, hide /proc, and forbid new user namespaces, which would give rights."""
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmp", "/tmp", "tmpfs", flags | kernel.MS_NOEXEC, f"size={disk},nr_inodes=1000,mode=700")
    with open("/proc/sys/user/max_user_namespaces", "w") as file:
        file.write("0")
    kernel.mount("none", "/proc", "tmpfs", flags | kernel.MS_RDONLY, "size=4k,nr_inodes=2")
    os.chdir("/tmp")


def _limit(order: dict) -> None:
    # Solutions raise the limit of their stack; the address space bounds it.
    resource.setrlimit(resource.RLIMIT_STACK, (STACK, resource.getrlimit(resource.RLIMIT_STACK)[1]))
    for limit, value in (
        (resource.RLIMIT_AS, order["memory_mb"] << 20),
        (resource.RLIMIT_CPU, math.ceil(order["cpu_s"])),
        (resource.RLIMIT_FSIZE, order["output_mb"] << 20),
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
        return program.serve(text, channel, order["test_s"], WAITED)
    return tester.main(json.loads(text), channel)
