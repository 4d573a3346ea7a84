"""How much memory this machine has, and which freed pages go back to the system."""

import os
import subprocess
import sys
from pathlib import Path

import torch

from megatron_rft.utils import device


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_the_machines_memory(monkeypatch, tmp_path):
    (kib,) = [line.split()[1] for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal")]
    whole = 1024 * int(kib)
    monkeypatch.setattr(device, "LIMITS", ())
    assert abs(device.machine_bytes() - whole) < 1 << 20
    (tmp_path / "limit").write_text("1000000\n")
    (tmp_path / "none").write_text("max\n")
    monkeypatch.setattr(device, "LIMITS", (str(tmp_path / "none"), str(tmp_path / "limit")))
    assert device.machine_bytes() == 1000000


def test_large_blocks_are_reused():
    """Else the second block of 80 MB gets new pages, and so does the next one after more than a GiB was freed."""
    script = """
import ctypes, resource
from megatron_rft.utils import device
c = ctypes.CDLL(None)
c.malloc.restype = ctypes.c_void_p
def new_pages(blocks=1):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    taken = [ctypes.c_void_p(c.malloc(80_000_000)) for _ in range(blocks)]
    for block in taken:
        ctypes.memset(block, 1, 80_000_000)
    for block in taken:
        c.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
first = new_pages(), new_pages()
device.keep_large_blocks()
print(*first, new_pages(15), new_pages())
"""
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    *new, reused = map(int, done.stdout.split())
    assert reused < min(new) / 10


def test_gaps_between_blocks_go_back():
    """Blocks of 100 KB, which glibc takes from its heap; every second one is freed."""
    blocks = [torch.ones(25_000) for _ in range(2000)]
    kept = blocks[::2]
    del blocks
    before = resident()
    device.return_free_pages()
    assert before - resident() > 60e6 and len(kept) == 1000
