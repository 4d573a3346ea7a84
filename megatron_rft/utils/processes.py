"""Starts the helper processes of a run; removes the shared memory that processes leave, and reserves free ports.

Helpers are graders, sandboxes, engines, environments and the writers of checkpoints. `timeout`, a terminal and Slurm
send a stop signal to all processes of a run. The run needs its helpers to finish the step and to save, so each of them
is started by `start_helper`, or forked inside `without_stop_signals`: it never receives a stop signal, and it ends when
the process that started it ends, for any reason.
"""

import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megatron_rft.utils import end_with_parent
from megatron_rft.utils.end_with_parent import END, STOP_SIGNALS, status_fields

ENDING = (sys.executable, "-IS", end_with_parent.__file__)  # followed by the parent's pid and a command
REAPER = (*ENDING, "--reap")  # followed by a folder to remove, or nothing, and the same
FIRST_INTERRUPT = "stopping after this step; Ctrl-C again to kill\n"
SAME_S = 1.0


def start_helper(
    command: list[str], reap: bool = False, remove: Path | None = None, log: Path | None = None, **options: Any
) -> subprocess.Popen:
    """Start a helper process of a run, in a session of its own. `reap`: when it ends, or is told to by `end_reaper`,
    kill all processes that it has started. `remove`: with `reap`, a folder to remove if this process ends before it.
    `log`: the file to which its output is appended. `options`: those of Popen."""
    whole = [*((*REAPER, str(remove or "")) if reap else ENDING), str(os.getpid()), *command]
    options = {"stdin": subprocess.DEVNULL, "start_new_session": True} | options
    with contextlib.ExitStack() as stack:
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            options["stdout"] = options["stderr"] = stack.enter_context(log.open("ab"))
        return _starter(os.getpid()).submit(subprocess.Popen, whole, **options).result()


def end_reaper(process: subprocess.Popen) -> None:
    """End a helper that was started with `reap`, and all processes that it has started."""
    process.send_signal(END)
    process.wait()


def absolute(part: str) -> str:
    """A part of a command for another working folder: the path of a file is made absolute."""
    return os.path.abspath(part) if os.path.isfile(part) else part  # a script of a shell is too long for Path.is_file


@contextlib.contextmanager
def without_stop_signals() -> Iterator[None]:
    """Processes that this thread starts inside never receive a stop signal, because the mask of blocked signals is
    inherited and, unlike a handler, not replaced by the libraries of the process. A forked one calls `die_with`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@functools.cache
def _starter(_process: int) -> ThreadPoolExecutor:
    """Return the thread of this process that starts its helpers. It lives as long as the process: the kernel signals a
    child when the thread that started it ends."""
    return ThreadPoolExecutor(1, "helpers", signal.pthread_sigmask, (signal.SIG_BLOCK, (*STOP_SIGNALS, END)))


class Interrupts:
    """Tells a second Ctrl-C from one SIGINT that arrives twice at once: `timeout` sends it to a process and to its
    group."""

    def __init__(self) -> None:
        self._first: float | None = None

    def again(self) -> bool:
        """Call it for each SIGINT. Returns whether it is another one."""
        now = time.monotonic()
        self._first = self._first or now
        return now - self._first > SAME_S


def reserved_port(host: str = "127.0.0.1") -> socket.socket:
    """Bind a free port of `host`, an address of this machine. The kernel gives it to no other process while the
    returned socket is open. On Linux a server that sets SO_REUSEADDR can still listen on it."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((host, 0))
    return reserved


def activity(reaper: int) -> tuple[str | None, float]:
    """What changes when the command of a reaper computes: context switches of its threads (None: one computes now, or
    waits for a processor); and how many seconds it has computed."""
    found, runs, ticks = [], False, 0
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{reaper}/task/{reaper}/children").read_text().split():
            ticks += sum(map(int, status_fields(int(child))[11:13]))
            for task in Path(f"/proc/{child}/task").iterdir():
                about = (task / "status").read_text(errors="replace")
                runs |= "\nState:\tR" in about
                found.append(about[about.rindex("\nvoluntary") :])
    return None if runs else "".join(found), ticks / os.sysconf("SC_CLK_TCK")


def process_state(pid: int) -> str:
    """Return the letter of its state; empty where there is no such process."""
    return (status_fields(pid) or [""])[0]


def started(pid: int) -> str:
    """Return when a process was started; empty where there is none, or where it has ended."""
    fields = status_fields(pid)
    return fields[19] if fields and fields[0] != "Z" else ""
