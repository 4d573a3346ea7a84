"""Where a rank is, as another process reads it."""

import subprocess
import sys
import time

import pytest

from megatron_rft.utils.position import GROUPS, Here, members, read, shortened


def test_what_is_written_is_read(tmp_path):
    here, path = Here(), tmp_path / "rank_3.position"
    assert read(path, 3) is None
    here.open(path)
    first = read(path, 3)
    here.begin_step(12), here.enter("training"), here.next_micro_batch(), here.next_micro_batch()
    here.add_group("7", "7 tensor", shortened([2, 3]))
    here.collective("7", "all_reduce"), here.collective("7", "broadcast"), here.wait(True)
    found = read(path, 3)
    assert (found.step, found.phase, found.micro_batch, found.waiting) == (12, "training", 2, True)
    assert first.phase == "start" and found.moves > first.moves
    assert found.last == "7 tensor" and found.groups[found.last] == ("2,3", "broadcast", 2)
    for number in range(2 * GROUPS):  # more than there is room for
        here.add_group(f"more {number}", "x", "0"), here.collective(f"more {number}", "send")
    assert len(read(path, 3).groups) <= GROUPS


@pytest.mark.parametrize("ranks", [[0], [0, 1], [3, 1], [0, 4, 8, 12], list(range(512)), [0, 1, 5]])
def test_members_keep_their_ranks(ranks):
    assert members(shortened(ranks)) == ranks


def test_an_update_takes_microseconds(tmp_path):
    here = Here()
    here.open(tmp_path / "rank_0.position")
    here.add_group("1", "1", "0,1")
    begin = time.process_time()
    for _ in range(10_000):
        here.collective("1", "all_reduce")
    assert (time.process_time() - begin) / 10_000 < 50e-6


STACKS_OF_A_PARENT = """
import os, signal, sys
from pathlib import Path
from megatron_rft.launching.hangs import masks
from megatron_rft.utils.position import write_stacks_on_signal

write_stacks_on_signal(Path(sys.argv[1]))
if (child := os.fork()) == 0:
    print("child", "SigCgt" in masks(os.getpid(), signal.SIGUSR2), flush=True)
    os._exit(0)
os.waitpid(child, 0)
print("parent", "SigCgt" in masks(os.getpid(), signal.SIGUSR2))
os.kill(os.getpid(), signal.SIGUSR2)
"""


def test_a_forked_child_does_not_write_into_its_parents_stacks(tmp_path):
    """Both have the same open file; the launcher asks only processes that catch the signal."""
    command = [sys.executable, "-c", STACKS_OF_A_PARENT, str(tmp_path / "x.stack")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["child", "False", "parent", "True"]
    assert "most recent call first" in (tmp_path / "x.stack").read_text()
