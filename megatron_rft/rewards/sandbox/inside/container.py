"""Builds the container around a server and its cells from namespaces.

It has no network, read-only files of the interpreter and of the system's libraries only, a /dev of five harmless
devices, its own processes, and a user without rights.
"""

import os
import signal
import stat

import kernel

DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
KEPT = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC  # a remount must repeat a mount's locked flags


def enter(read_only: list[str]) -> None:
    """Fork a child process inside the container and return in the child; the parent waits for it and exits."""
    user = os.geteuid(), os.getegid()
    namespaces = kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET
    namespaces |= kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
    kernel.unshare(namespaces | (kernel.CLONE_NEWUSER if user[0] else 0))
    if user[0]:
        kernel.map_own_user(*user)
    child = os.fork()
    if child:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    _mount_root(read_only)


def _mount_root(read_only: list[str]) -> None:
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    paths = [path for path in (*read_only, *DEVICES) if os.path.exists(path)]
    links = {path: os.readlink(path) for path in paths if os.path.islink(path)}
    handles = {path: os.open(path, os.O_PATH) for path in paths if path not in links}
    kernel.mount("root", "/tmp", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,size=1m")
    for path, handle in handles.items():  # opened before the mount over /tmp, because they may be under /tmp
        _bind(f"/proc/self/fd/{handle}", f"/tmp{path}", stat.S_ISDIR(os.fstat(handle).st_mode), path in DEVICES)
        os.close(handle)
    for path, target in links.items():
        os.symlink(target, f"/tmp{path}")
    for name in ("/tmp/proc", "/tmp/tmp"):
        os.makedirs(name, exist_ok=True)
    kernel.mount("proc", "/tmp/proc", "proc", KEPT)
    os.chdir("/tmp")
    kernel.pivot_root_here()
    kernel.mount("none", "/", None, kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | KEPT & ~kernel.MS_NOEXEC)


def _bind(source: str, target: str, folder: bool, device: bool) -> None:
    os.makedirs(target if folder else os.path.dirname(target), exist_ok=True)
    if not folder:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    kernel.mount(source, target, None, kernel.MS_BIND | kernel.MS_REC)
    flags = os.statvfs(target).f_flag & KEPT
    flags |= kernel.MS_NOSUID | (0 if device else kernel.MS_NODEV)
    kernel.mount("none", target, None, kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | flags)
