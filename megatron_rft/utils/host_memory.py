"""The memory of this machine. No torch."""

import ctypes
from pathlib import Path

LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def machine_bytes() -> int | None:
    """What processes may take here: all memory, or a container's limit; None where Linux does not say."""
    found = []
    try:
        line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
        found.append(int(line.split()[1]) << 10)
    except (OSError, StopIteration):
        return None
    for limit in LIMITS:
        try:
            found.append(int(Path(limit).read_text()))
        except (OSError, ValueError):  # absent, or "max"
            continue
    return min(found)


def return_free_pages() -> None:
    """Give what the allocator keeps free back to the system, with glibc; elsewhere this does nothing.

    Batches of all lengths leave gaps of a megabyte between blocks, which glibc would keep for itself.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
