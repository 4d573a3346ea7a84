"""Finds a rank that is slower than the others, by the seconds that it works in each phase without waiting for them."""

from statistics import median

import torch
import torch.distributed as dist

from megatron_rft.megatron import parallel
from megatron_rft.tracking.progress import SLOWER

PHASES = ("generation", "reward", "refine", "logprobs", "training", "verification", "sync", "evaluation", "other")
STEPS = 10  # in a row


class Stragglers:
    """Compares the ranks after each step, with one small all_gather on the host. All ranks call it together.

    Work is wall time outside waits for collectives. On GPUs the host does not wait for a collective, so that the wait
    is part of the work there: `training` of all ranks is then about equal, and generation and grading tell them apart.
    """

    def __init__(self, hosts: list[str]) -> None:
        """`hosts`: the node of each rank."""
        self.hosts = hosts
        self.rank, self.steps = -1, 0  # the slowest rank, and for how many steps in a row

    def take(self, work: dict[str, float], step: int) -> tuple[dict[str, float], str]:
        """Metrics, and a sentence when a rank has been slow for `STEPS` steps; empty otherwise. `work`: seconds by
        phase of this rank."""
        if len(self.hosts) == 1:
            return {}, ""
        own = torch.tensor([work.get(phase, 0.0) for phase in PHASES])
        rows = [torch.empty_like(own) for _ in self.hosts]
        dist.all_gather(rows, own, group=parallel.host_group("generation"))
        return self.compare(torch.stack(rows).tolist(), step)

    def compare(self, rows: list[list[float]], step: int) -> tuple[dict[str, float], str]:
        """`rows`: for each rank the seconds of PHASES."""
        totals = [sum(row) for row in rows]
        middle, slowest = median(totals), max(range(len(rows)), key=totals.__getitem__)
        metrics = {"ranks/work_median": middle, "ranks/work_slowest": totals[slowest], "ranks/slowest": slowest}
        for number, phase in enumerate(PHASES):
            if any(row[number] for row in rows):
                metrics[f"ranks/{phase}_median"] = median(row[number] for row in rows)
                metrics[f"ranks/{phase}_slowest"] = max(row[number] for row in rows)
        slow = totals[slowest] > SLOWER * middle
        self.steps = self.steps + 1 if slow and slowest == self.rank else int(slow)
        self.rank = slowest if slow else -1
        return metrics, self._sentence(rows, totals, middle, step) if slow and self.steps == STEPS else ""

    def _sentence(self, rows: list[list[float]], totals: list[float], middle: float, step: int) -> str:
        behind = [rows[self.rank][n] - median(row[n] for row in rows) for n in range(len(PHASES))]
        phase = PHASES[max(range(len(PHASES)), key=behind.__getitem__)]
        return (
            f"step {step}: rank {self.rank} on node {self.hosts[self.rank]} has been the slowest for {STEPS} steps: it "
            f"worked {totals[self.rank]:.2f} s in this step, the median rank {middle:.2f} s; most of the difference is "
            f"in {phase} (docs/troubleshooting.md, It is slow)"
        )
