"""`megatron-rft train --nproc N`, in which one rank hangs. HANG says which, where and how: "1 training 2 stop" is
rank 1 when it enters the phase training of step 2.

stop: SIGSTOP. loop: an endless loop. other: a barrier that no other rank calls. engine: SIGSTOP of its engine process.
grader: its reward never ends. slow: from then on, each of its steps takes three times as long; all ranks measure their
phases without the time in which they wait for a processor, so that no load decides which phase is the longest.

The launcher judges only once the rank hangs, so that pauses of a busy machine before that do not count. HANG_MARK: the
file that says so.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch.distributed as dist

from megatron_rft.commands import main
from megatron_rft.launching.hangs import Pauses
from megatron_rft.rollout.sampler import Sampler
from megatron_rft.tracking.throughput import Phases
from megatron_rft.utils.position import Here, here
from tests.integration import jumping
from tests.integration.engine_process import engine

rank, phase, step, kind = os.environ["HANG"].split()
enter, score, limit = Here.enter, Sampler._score, Pauses.limit
mark = Path(os.environ["HANG_MARK"])
schedstat = Path("/proc/self/schedstat")
awake: list[float] = []  # when a slow rank ended its last sleep


def clock() -> float:
    """Seconds without those in which the main thread was ready to run, but not running (proc(5))."""
    return time.monotonic() - (int(schedstat.read_text().split()[1]) / 1e9 if schedstat.exists() else 0)


def loop() -> None:
    os.nice(10)  # beside other tests it takes the processor less
    while True:
        pass


def hang() -> None:
    mark.touch()
    if kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "loop":
        loop()
    elif kind == "slow":
        time.sleep(2 * (clock() - awake.pop()) if awake else 0)
        awake.append(clock())
    elif kind == "engine":
        os.kill(engine(), signal.SIGSTOP)
    else:
        dist.barrier()


def entering(self: Here, name: str) -> None:
    enter(self, name)
    due = name == phase and self._record.step >= int(step) and threading.current_thread() is threading.main_thread()
    if due and os.environ["RANK"] == rank and kind != "grader":
        hang()


def scoring(self: Sampler, *arguments):
    if os.environ["RANK"] == rank and here._record.step >= int(step):
        mark.touch()
        loop()
    return score(self, *arguments)


def limit_of_a_hang(self: Pauses, phase: str, step: int) -> float:
    return limit(self, phase, step) if mark.exists() else float("inf")


if "RANK" not in os.environ:
    Pauses.limit = limit_of_a_hang
    sys.exit(jumping.launch(__file__))
Here.enter = entering
if kind == "grader":
    Sampler._score = scoring
elif kind == "slow":
    time.perf_counter, Phases.__init__.__defaults__ = clock, (clock,)
sys.exit(main.main())
