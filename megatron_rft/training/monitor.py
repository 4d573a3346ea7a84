"""Observers of a run: averages over a step, non-finite steps, slow ranks, loads of experts, alarms.

Alarms are about known failures of the algorithms (`tracking.alarms` turns them off) and about the train-inference
mismatch, which has bounds in the section `faults`. Nothing here changes a number that is trained on.
"""

import math
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch.distributed as dist
from safetensors.torch import save_file

from megatron_rft.config.sections import Faults
from megatron_rft.megatron import parallel
from megatron_rft.megatron.routers import Routers
from megatron_rft.tracking.observer import Observer, Trained
from megatron_rft.tracking.progress import SLOWER
from megatron_rft.tracking.throughput import Phases
from megatron_rft.utils.errors import RunFailed

STEPS = 10  # that a condition must hold in a row
FIRST = 20  # steps whose mean is compared with
PAGE = "docs/troubleshooting.md"
Metrics = dict[str, float]
CAUSES_OF_MISMATCH = (
    "`megatron-rft diagnose RECIPE --run RUN` says whether it is rounding or a bug, and whose. "
    "algorithm.importance=truncated corrects for rounding"
)


class Mean(Observer):
    """Means over the optimizer steps of a training step, named policy/loss, verification/grad_norm and so on; names
    that contain a slash are kept."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = defaultdict(list)

    def trained(self, step: Trained) -> None:
        if "no_gradient" in step.mini_batch.sequences:
            step.metrics["computed_share"] = len(step.computed) / len(step.mini_batch)
        for name, value in step.metrics.items():
            self.values[name if "/" in name else f"{step.name}/{name}"].append(value)

    def end_of_step(self, step: int, metrics: Metrics) -> None:
        metrics |= {name: sum(values) / len(values) for name, values in self.values.items()}
        self.values.clear()


@dataclass
class Loads(Observer):
    """The tokens of each expert, by layer. `write(step, loads)`: into the run's file."""

    routers: Routers
    write: Callable[[int, dict[int, list[int]]], None]

    def end_of_step(self, step: int, metrics: Metrics) -> None:
        """The largest and the smallest load of an expert over all layers, as multiples of its layer's mean."""
        loads = self.routers.take()
        if relative := [count * len(layer) / sum(layer) for layer in loads.values() if sum(layer) for count in layer]:
            metrics |= {"experts/load_max": max(relative), "experts/load_min": min(relative)}
        if loads:
            self.write(step, loads)


@dataclass
class MismatchBounds(Observer):
    """The engine's log-probs, of the trainer's current weights, beside the trainer's. A bound that is exceeded is a
    warning, or RunFailed if faults.on_mismatch is "stop"."""

    faults: Faults

    def end_of_step(self, step: int, metrics: Metrics) -> str | None:
        beyond = [
            f"mismatch/{name} {value:.3g} is above faults.mismatch_{name}, {bound:g}"
            for name, bound in (("kl", self.faults.mismatch_kl), ("share", self.faults.mismatch_share))
            if not (value := metrics.get(f"mismatch/{name}", 0.0)) <= bound
        ]
        if not beyond:
            return None
        told = f"step {step}: engine and trainer disagree on the same tokens: {'; '.join(beyond)}. {CAUSES_OF_MISMATCH}"
        if self.faults.on_mismatch == "stop":
            raise RunFailed(told)
        return told


@dataclass
class Alarm(Observer):
    """`condition(metrics, first)` must hold in the last STEPS steps that have the metric `needs`; `first` is its mean
    over the first of them; NaN is no value. An alarm is told when this becomes true, and again only after it was false.
    A resumed run begins its windows again.
    """

    needs: str
    condition: Callable[[Metrics, float], bool]
    sentence: str
    page: str = f"{PAGE}, The reward does not rise"
    first: list[float] = field(default_factory=list)
    last: deque[Metrics] = field(default_factory=lambda: deque(maxlen=STEPS))
    holds: bool = False

    def end_of_step(self, step: int, metrics: Metrics) -> str:
        if math.isnan(value := metrics.get(self.needs, math.nan)):
            return ""
        if len(self.first) < FIRST:
            self.first.append(value)
        self.last.append(metrics)
        before, mean = self.holds, sum(self.first) / len(self.first)
        self.holds = len(self.last) == STEPS and all(self.condition(each, mean) for each in self.last)
        if before or not self.holds:
            return ""
        return f"step {step}: for {STEPS} steps {self.sentence}. See {self.page}"


ALARMS = (
    Alarm(
        "policy/entropy",
        lambda step, first: step["policy/entropy"] < 0.1 * first,
        "the entropy has collapsed: below a tenth of what it was at first (policy/entropy)",
    ),
    Alarm(
        "response/length_mean",
        lambda step, first: step["response/length_mean"] > 2 * first and step.get("response/finished", 0.0) < 0.5,
        "the responses explode: more than twice as long as at first, and most do not end (response/length_mean, "
        "response/finished)",
    ),
    Alarm(
        "response/finished",
        lambda step, _: step["response/finished"] == 0,
        "no response ends: rollout.max_response_tokens, or environment.turn_tokens, cuts all of them off "
        "(response/finished)",
    ),
    Alarm(
        "reward/group_std",  # absent where a group is one response, which always agrees with itself
        lambda step, _: step["reward/group_std"] < 1e-6,
        "in every group all responses have the same reward, so that none is better than another (reward/group_std)",
    ),
    Alarm(
        "policy/kl",
        lambda step, _: step["policy/kl"] > 1.0,
        "the policy is far from the reference: more than 1 nat per token (policy/kl)",
        f"{PAGE}, It learns, then collapses",
    ),
    Alarm(
        "pipo/suppressed",
        lambda step, _: step["pipo/suppressed"] == 1,
        "PIPO has suppressed every step, that is, the reward has stayed below its anchor (pipo/suppressed, pipo/xi)",
        "docs/pipo_from_paper_to_recipe.md",
    ),
    Alarm(
        "constraint/improved",
        lambda step, _: step["constraint/improved"] == 0 < step["constraint/refined"],
        "the refiner has improved no response (constraint/improved)",
        "docs/dynamic.md",
    ),
    Alarm(
        "dynamics/future_weight_saturated",
        lambda step, _: step["dynamics/future_weight_saturated"] > 0.95,
        "FPA's weights are nearly all within 0.01 of 0 or 1 (dynamics/future_weight_saturated)",
        "docs/offline.md",
    ),
    Alarm(
        "experts/load_min",
        lambda step, _: step["experts/load_min"] == 0,
        "some expert got no token (experts/load_min; RUN/experts.jsonl has which)",
        "docs/models.md, Loads of the experts",
    ),
)


PHASES = ("generation", "reward", "refine", "logprobs", "training", "verification", "sync", "evaluation", "other")


class NonFiniteGuard(Observer):
    """Allows `bound` skipped steps of an update in a row. One more writes the batch to disk and ends the run."""

    def __init__(self, output_dir: Path, bound: int):
        self.output_dir, self.bound, self.skipped = output_dir, bound, (0, 0)  # in a row, in all
        self.last = ""  # the update of the last skipped step: a critic's good step says nothing about the policy's

    def trained(self, step: Trained) -> None:
        in_a_row, in_all = self.skipped
        if step.metrics["skipped"]:
            self.skipped, self.last = (in_a_row + 1, in_all + 1), step.name
        elif self.last in ("", step.name):
            self.skipped = (0, in_all)
        if self.skipped[0] <= self.bound:
            return
        metrics, path = step.metrics, self.output_dir / f"failed_batch_step_{step.number:06d}.safetensors"
        if dist.get_rank() == 0:
            save_file(step.mini_batch.state_dict(), path)
        raise RunFailed(
            f"step {step.number}: loss {metrics['loss']}, gradient norm {metrics['grad_norm']}: not finite "
            f"{self.skipped[0]} times in a row, more than faults.max_skipped_steps = {self.bound}. The batch is in "
            f"{path}; the newest checkpoint is from before these steps. A lower optimizer.lr, or fp32, usually helps"
        )

    def end_of_step(self, step: int, metrics: Metrics) -> None:
        metrics["faults/skipped_steps"] = self.skipped[1]


class Stragglers(Observer):
    """Compares the ranks after each step. All ranks call it together.

    Work is wall time outside waits for collectives. On GPUs the host does not wait for a collective, so that the wait
    is part of the work there: `training` of all ranks is then about equal, and generation and grading tell them apart.
    """

    def __init__(self, hosts: list[str], phases: Phases) -> None:
        """`hosts`: the node of each rank. `phases`: of this rank; they are taken after it."""
        self.hosts, self.phases = hosts, phases
        self.rank, self.steps = -1, 0  # the slowest rank, and for how many steps in a row

    def end_of_step(self, step: int, metrics: Metrics) -> str:
        if len(self.hosts) == 1:
            return ""
        work = self.phases.work()
        found, sentence = self.compare(parallel.gather([[work.get(phase, 0.0) for phase in PHASES]]), step)
        metrics |= found
        return sentence

    def compare(self, rows: list[list[float]], step: int) -> tuple[dict[str, float], str]:
        """Metrics, and a sentence when a rank has been slow for `STEPS` steps; empty otherwise. `rows`: for each rank
        the seconds of PHASES."""
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


def due(every: int, step: int) -> bool:
    """True in the first step and every `every`-th step; never if `every` is 0."""
    return bool(every) and (step == 1 or step % every == 0)
