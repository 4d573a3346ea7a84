"""Ends a process with the one that started it.

    end_with_parent.py PARENT COMMAND...                   becomes the command
    end_with_parent.py --reap REMOVE PARENT COMMAND...     runs it, and kills all that it has started

Both end with PARENT, and the command ignores the signals that stop a run. This file imports little, because every
helper of a run (processes.py) and every program of an environment starts with it.
"""

import ctypes
import os
import signal
import sys

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)  # what asks a run to save and end
END = signal.SIGHUP  # what ends a reaper
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
SHARED = r"/dev/shm/(psm_|vllm_dist_|.*cpushm)"  # vLLM's: Python's, and that of its ranks on CPUs


def die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Make the kernel signal this process when the thread of `parent` that started it ends, for any reason."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # the parent ended before the call
        os.kill(os.getpid(), number)


def become(parent: int, command: list[str]) -> None:
    die_with(parent)
    for each in STOP_SIGNALS:  # they are blocked, but some shells clear the mask when they start
        signal.signal(each, signal.SIG_IGN)
    os.execvp(command[0], command)


def reaper(remove: str, parent: int, command: list[str]) -> int:
    """Run a command, and kill all processes that it started when it ends, on END, and when `parent` ends. Returns the
    command's status. Removes vLLM's shared memory that these processes used, and the folder `remove`, unless it is
    empty, if `parent` has ended. A new folder of that name stays."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphaned grandchildren become this process's children
    signal.signal(END, _leave)
    try:
        die_with(parent, END)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [END])  # it may have come already; nohup would have it ignored
        own = os.getpid()
        if not (child := os.fork()):
            try:
                become(own, command)
            except OSError as error:
                print(f"{command[0]}: {error}", file=sys.stderr, flush=True)
            os._exit(127)
        os.closerange(3, max(map(int, os.listdir("/proc/self/fd"))) + 1)  # those of `pass_fds` are the command's alone
        os.chdir(remove or ".")
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        signal.signal(END, signal.SIG_IGN)
        _kill_children()
        if remove and os.getppid() != parent and os.readlink("/proc/self/cwd") == os.path.realpath(remove):
            remove_folder(remove)


def remove_folder(path: str) -> None:
    """Also one with folders that are read-only, such as Go's module cache."""
    import shutil
    from contextlib import suppress

    for folder, _, _ in os.walk(path):
        with suppress(OSError):  # another user's, or gone
            os.chmod(folder, 0o700)
    shutil.rmtree(path, ignore_errors=True)


def _kill_children() -> None:
    shared: set[str] = set()
    while left := children(os.getpid()):
        shared |= {path for pid in left for path in shared_memory(pid)}
        for pid in left:
            os.kill(pid, signal.SIGKILL)  # nobody else waits for it: the pid stays its own
        for pid in left:
            os.waitpid(pid, 0)
    for path in shared:
        if os.path.exists(path):
            os.unlink(path)


def _leave(number: int, _frame: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second signal must not interrupt the cleanup
    sys.exit(128 + number)


def shared_memory(pid: int, pattern: str = SHARED) -> set[str]:
    """Paths that begin with `pattern` of files that a process has mapped and that still have a name."""
    import re

    paths = ("/" + line.partition("/")[2] for line in read(f"/proc/{pid}/maps").splitlines())
    return {path for path in paths if re.match(pattern, path) and not path.endswith(" (deleted)")}


def read(path: str) -> str:
    """The text of a file of /proc; empty where there is none."""
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def children(pid: int) -> list[int]:
    """Return the pids of the children, including zombies. Scans all processes, because the kernel lists children by
    thread, and the list of threads changes."""
    every = (int(name) for name in os.listdir("/proc") if name.isdigit())
    return sorted(each for each in every if parent_of(each) == pid)


def status_fields(pid: int) -> list[str]:
    """What /proc/PID/stat has after the program's name, which may contain spaces: state, parent, ...; empty where there
    is no such process."""
    return read(f"/proc/{pid}/stat").rpartition(")")[2].split()


def parent_of(pid: int) -> int:
    """Return the parent's pid; 0 where there is no such process."""
    fields = status_fields(pid)
    return int(fields[1]) if fields else 0


if __name__ == "__main__":
    if sys.argv[1] != "--reap":
        become(int(sys.argv[1]), sys.argv[2:])
    status = reaper(sys.argv[2], int(sys.argv[3]), sys.argv[4:])
    if status < 0:
        os.kill(os.getpid(), -status)  # end as the command did
    sys.exit(status)
