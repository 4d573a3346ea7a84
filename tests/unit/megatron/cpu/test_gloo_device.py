"""The groups of a rank on a CPU share one thread of gloo, in a process without other groups."""

import subprocess
import sys

PROGRAM = """
import os
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
from megatron_rft.config.sections import Megatron
from megatron_rft.megatron import parallel
parallel.initialize(Megatron())
group = dist.new_group(backend="gloo", timeout=timedelta(seconds=7))
total = torch.ones(2)
dist.all_reduce(total, group=group)
dist.monitored_barrier(group)  # for gloo's groups alone
names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
print(names.count("gloo_tcp_loop"), group._get_backend(torch.device("cpu")).options._timeout, total.tolist())
"""


def test_one_thread_serves_all_groups():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-1:] == ["1 0:00:07 [1.0, 1.0]"], done.stderr[-2000:]
