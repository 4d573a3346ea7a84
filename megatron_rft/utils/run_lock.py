"""Keeps two starts out of one run's folder: RUN/launch/lock.json says which process trains there.

The process that the user started holds it: the launcher of the first node, or the only rank. On its own machine others
ask the kernel whether that process still runs. Elsewhere they look at the file's age: a live holder replaces it every
BEAT_S, and both times are those of the file system's server, so that neither a disk without locks nor a wrong clock
matters.
"""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_rft.utils.errors import FAILED, ConfigError
from megatron_rft.utils.files import read_json, write_atomically
from megatron_rft.utils.processes import started

BEAT_S = 10.0
EXPIRES_S = 60.0


@dataclass(frozen=True)
class Holder:
    """`machine`: whose processes have these numbers. `started`: the process, should its pid be reused. `since`: in
    seconds since 1970. `job`: of Slurm."""

    host: str
    pid: int
    machine: str
    started: str
    since: float
    job: str | None

    def __str__(self) -> str:
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        job = f", Slurm job {self.job}" if self.job else ""
        return f"process {self.pid} on {self.host}{job}, since {began}"


LOCKED: dict[Path, Holder] = {}  # folders of this process


def lock_file(folder: Path) -> Path:
    return folder / "launch" / "lock.json"


def this_process() -> Holder:
    pid = os.getpid()
    return Holder(socket.gethostname(), pid, machine(), started(pid), time.time(), os.environ.get("SLURM_JOB_ID"))


def machine() -> str:
    """The boot of this machine and the container's process numbers; its name where there is no /proc."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return socket.gethostname()


def holder(folder: Path) -> Holder | None:
    """Who has locked a run's folder, dead or alive."""
    with suppress(TypeError):
        return Holder(**(read_json(lock_file(folder)) or {}))
    return None


def alive(folder: Path, other: Holder) -> bool:
    """Whether the holder lives; one on another machine is believed to for EXPIRES_S after its last sign."""
    if other.machine == machine():
        return started(other.pid) == other.started
    return time.time() - _changed(lock_file(folder)) < EXPIRES_S


def refuse_others(folder: Path, same_job: bool = False) -> str:
    """Return a note about the lock of a process that has ended; empty if there is none. `same_job`: this is another
    node of the holder's job.

    Raises:
        ConfigError: a process trains there.
    """
    other = holder(folder)
    if other is None or same_job and other.job == this_process().job:
        return ""
    if alive(folder, other) if other.machine == machine() else _beats(folder, other):
        if holder(folder) != other:  # another process has taken it over meanwhile, or unlocked it
            return refuse_others(folder, same_job)
        raise ConfigError(f"run.output_dir {folder}: {other}, trains there. Wait for its end, or choose another folder")
    return f"{other}, has ended without unlocking {folder}: its lock is taken over"


def _beats(folder: Path, other: Holder) -> bool:
    """Whether a holder on another machine still replaces its file. Waits until that is known."""
    file, probe = lock_file(folder), lock_file(folder).with_name(f"probe.{os.getpid()}")
    first = _changed(file)
    print(f"{other}, has locked {folder}: waiting up to {EXPIRES_S:.0f} s to see whether it lives", flush=True)
    try:
        while _changed(file) == first:
            probe.touch()  # its time is the file server's, as that of the lock
            if _changed(probe) - first > EXPIRES_S:
                return False
            time.sleep(1)
    finally:
        probe.unlink(missing_ok=True)
    return True


def _changed(file: Path) -> float:
    with suppress(OSError):
        return file.stat().st_mtime
    return 0.0


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Lock a run's folder, and print the note of `refuse_others`, which may raise."""
    told, own, over = refuse_others(folder), this_process(), threading.Event()
    if told:
        print(f"warning: {told}", flush=True)
    write_atomically(lock_file(folder), json.dumps(asdict(own)))
    LOCKED[folder] = own
    beating = threading.Thread(target=_beat, args=(folder, own, over), daemon=True)
    beating.start()
    try:
        yield
    finally:
        over.set()
        beating.join()
        release()


def release() -> None:
    """Unlock what this process has locked: for an exit at once, too."""
    for folder, own in LOCKED.items():
        if holder(folder) == own:
            lock_file(folder).unlink(missing_ok=True)
    LOCKED.clear()


def _beat(folder: Path, own: Holder, over: threading.Event) -> None:
    """Replace the file now and then. Two starts that locked the folder at once, or one that was frozen for long, find
    another holder there: then this one ends, as nothing may write there any more."""
    while not over.wait(BEAT_S):
        found = holder(folder)
        if found not in (None, own):
            print(f"error: {folder} was taken over by {found}: this run ends", file=sys.stderr, flush=True)
            os._exit(FAILED)
        with suppress(OSError):
            write_atomically(lock_file(folder), json.dumps(asdict(own)))
