"""Ends a process with the one that started it.

As a program, `end_with_parent.py PARENT COMMAND...` becomes the command, which then ends with PARENT and ignores the
signals that stop a run. It imports little, because every helper of a run (processes.py) starts with it.
"""

import ctypes
import os
import signal
import sys

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)  # what asks a run to save and end
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Make the kernel signal this process when the thread of `parent` that started it ends, for any reason."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # the parent ended before the call
        os.kill(os.getpid(), number)


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    for each in STOP_SIGNALS:  # they are blocked, but some shells clear the mask when they start
        signal.signal(each, signal.SIG_IGN)
    os.execvp(sys.argv[2], sys.argv[2:])
