"""What positions, collective counts, stragglers and alarms cost: a run in which every other step goes without them.

    PYTHONPATH=. python tools/watch_cost.py train RECIPE --nproc 2 [section.option=value ...]

Each rank prints the median over pairs of steps of the processor time with them / without them. Processor time, so that
other work on the machine counts little; it leaves out the launcher, which looks once a second.
"""

import atexit
import os
import sys
import time
from statistics import median

from megatron_rft.commands import main
from megatron_rft.training.monitor import Alarm, Stragglers
from megatron_rft.utils.position import Here
from tests.integration import jumping

SKIPPED = 4  # steps at first, which are slower
UPDATES = ("enter", "move", "next_micro_batch", "collective", "wait")
on = {name: getattr(Here, name) for name in UPDATES}
kept = {owner: owner.end_of_step for owner in (Stragglers, Alarm)}
begin_step, ends = Here.begin_step, []


def begin(self: Here, step: int) -> None:
    """Even steps go without."""
    ends.append(time.process_time())
    begin_step(self, step)
    for name in UPDATES:
        setattr(Here, name, on[name] if step % 2 else lambda *_: None)
    for owner, looks in kept.items():
        owner.end_of_step = looks if step % 2 else lambda *_: None


def report() -> None:
    seconds = [after - before for before, after in zip(ends, ends[1:], strict=False)][SKIPPED:]
    ratios = [one / other for one, other in zip(seconds[::2], seconds[1::2], strict=False)]
    told = f"{median(seconds):.3f} s of processor time a step, {median(ratios):.4f} times that of a step without"
    print(f"rank {os.environ['RANK']}: {told} (median of {len(ratios)} pairs)", flush=True)


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.exit(jumping.launch(__file__))
    Here.begin_step = begin
    atexit.register(report)
    sys.exit(main.main())
