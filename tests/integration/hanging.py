"""`megatron-rft train --nproc N`, in which one rank hangs. HANG says which, where and how: "1 training 2 stop" is
rank 1 when it enters the phase training of step 2.

stop: SIGSTOP. loop: an endless loop. other: a barrier that no other rank calls. engine: SIGSTOP of its engine process.
grader: its reward never ends.

The launcher judges only once the rank hangs (MARK exists), so that pauses of a busy machine before that do not count.
"""

import os
import signal
import sys
import threading
from pathlib import Path

import torch.distributed as dist

from megatron_rft.commands import main
from megatron_rft.commands.parser import parse
from megatron_rft.config import load
from megatron_rft.launching import ranks
from megatron_rft.launching.hangs import Pauses
from megatron_rft.rollout.sampler import Sampler
from megatron_rft.utils.position import Here, here
from tests.integration.engine_process import engine

rank, phase, step, kind = os.environ["HANG"].split()
enter, score, limit = Here.enter, Sampler._score, Pauses.limit
MARK = "HANG_MARK"  # environment variable: the file that the hanging rank makes


def loop() -> None:
    while True:
        pass


def hang() -> None:
    Path(os.environ[MARK]).touch()
    if kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "loop":
        loop()
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
        Path(os.environ[MARK]).touch()
        loop()
    return score(self, *arguments)


def limit_of_a_hang(self: Pauses, phase: str, step: int) -> float:
    return limit(self, phase, step) if Path(os.environ[MARK]).exists() else float("inf")


def launch() -> int:
    args = parse()
    recipe = load(args.recipe, args.overrides)
    command = [sys.executable, __file__, "train", args.recipe, *args.overrides]
    os.makedirs(recipe.run.output_dir, exist_ok=True)
    os.environ[MARK] = os.path.join(recipe.run.output_dir, "hangs")
    Pauses.limit = limit_of_a_hang
    return ranks.launch(command, args.nproc, recipe.run.output_dir, faults=recipe.faults)


if "RANK" not in os.environ:
    sys.exit(launch())
Here.enter = entering
if kind == "grader":
    Sampler._score = scoring
sys.exit(main.main())
