"""Wraps Linux's system calls for isolation with ctypes: namespaces, mounts, capabilities and the system-call filter.

`container.py` and `cell.py` decide what is isolated.
"""

import ctypes
import json
import os
import platform
import signal
import struct
from functools import cache

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND = 1, 2, 4, 8, 32, 4096
MS_REC, MS_PRIVATE = 16384, 1 << 18
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    _checked(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    text = [None if each is None else each.encode() for each in (source, target, kind, data)]
    _checked(_libc.mount(*text[:3], ctypes.c_ulong(flags), text[3]), f"mount {target}")


def pivot_root_here() -> None:
    """Make the working directory the root, and unmount the old root."""
    number = {"x86_64": 155, "aarch64": 41}[platform.machine()]
    _checked(_libc.syscall(number, b".", b"."), "pivot_root")
    _checked(_libc.umount2(b".", MNT_DETACH), "umount of the old root")
    os.chdir("/")


def clone(flags: int) -> int:
    """Fork a child in new namespaces. Returns 0 in the child. The caller must have no other thread."""
    child = ctypes.PyDLL(None).syscall(CLONE[platform.machine()], flags | signal.SIGCHLD, 0, 0, 0, 0)
    if child == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    if child < 0:
        raise OSError("clone: the kernel refuses new namespaces")
    return child


def prctl(option: int, value: int, pointer: ctypes.c_void_p | None = None) -> None:
    _checked(_libc.prctl(option, ctypes.c_ulong(value), pointer, 0, 0), f"prctl {option}")


def map_own_user(uid: int, gid: int) -> None:
    """Map only this user into a new user namespace."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def become_nobody() -> None:
    """Change from root to the user nobody; other users stay. /proc/self must stay writable for `unshare`."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        prctl(PR_SET_DUMPABLE, 1)


def drop_capabilities() -> None:
    """Drop all capabilities. no_new_privs makes this permanent."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    header = struct.pack("=Ii", 0x20080522, 0)  # linux/capability.h, version 3: two words of each set
    _checked(_libc.capset(header, bytes(24)), "capset")


# System calls by architecture: FORBIDDEN are refused, ON_ITSELF are allowed only on the calling process.
with open(os.path.join(os.path.dirname(__file__), "forbidden_calls.json")) as file:
    FORBIDDEN = json.load(file)
ON_ITSELF = {"x86_64": (62, 200, 234, 129, 297), "aarch64": (129, 130, 131, 138, 240)}  # kill, tkill, tgkill, ...
CLONE = {"x86_64": 56, "aarch64": 220}
CLONE3 = 435
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CLONE_THREAD = 0x10000
ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026  # linux/seccomp.h; ERRNO | number

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # linux/bpf_common.h
NUMBER, ARCHITECTURE, ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data


def filter_system_calls() -> None:
    """Install the filter: threads may start, but no processes, sockets, or signals and traces to other processes."""
    program = compiled_filter(os.getpid())
    buffer = ctypes.create_string_buffer(program)
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))  # struct sock_fprog
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_SECCOMP, 2, ctypes.create_string_buffer(header))


@cache
def compiled_filter(pid: int) -> bytes:
    return b"".join(struct.pack("=HBBI", *each) for each in _filter(platform.machine(), pid))


def _filter(machine: str, pid: int) -> list[tuple[int, int, int, int]]:
    """Return (code, skip if true, skip if false, operand) of each instruction."""
    program = [(LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, AUDIT_ARCH[machine]), (RETURN, 0, 0, KILL)]
    program += [(LOAD, 0, 0, NUMBER)]
    if machine == "x86_64":
        program += [(AT_LEAST, 0, 1, 0x40000000), (RETURN, 0, 0, KILL)]  # the x32 calling convention
    # A filter cannot read the flags of clone3 in memory; libc falls back to clone.
    for number, result in [*((each, EPERM) for each in FORBIDDEN[machine].values()), (CLONE3, ENOSYS)]:
        program += [(EQUAL, 0, 1, number), (RETURN, 0, 0, result)]
    program += [(EQUAL, 0, 4, CLONE[machine]), (LOAD, 0, 0, ARGUMENT), (ANY_BIT, 1, 0, CLONE_THREAD)]
    program += [(RETURN, 0, 0, EPERM), (RETURN, 0, 0, ALLOW)]
    for number in ON_ITSELF[machine]:
        program += [(EQUAL, 0, 4, number), (LOAD, 0, 0, ARGUMENT), (EQUAL, 1, 0, pid)]
        program += [(RETURN, 0, 0, EPERM), (RETURN, 0, 0, ALLOW)]
    return [*program, (RETURN, 0, 0, ALLOW)]
