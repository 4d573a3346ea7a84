"""`megatron-rft rehearse`: runs a recipe's step at full size without GPUs, for the distinct pipeline stages."""

import argparse
import json
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_rft.config import load
from megatron_rft.plan import check, memory, model_shape
from megatron_rft.plan.devices import GIB, RESERVED, device
from megatron_rft.rehearsal import guard, report
from megatron_rft.rehearsal.report import Stage
from megatron_rft.utils.errors import FINISHED, ConfigError, DataError, RunFailed, UserError

ANY_WEIGHTS = ["model.initialise=random", "model.reference=null"]  # to check it, a folder with config.json is enough


def run(args: argparse.Namespace) -> int:
    """Rehearse, print the report, and return the exit status. Loads the recipe again, without its weights."""
    rehearsal = Rehearsal(args)
    guard.library()  # reports a missing library before any process starts
    print(rehearsal, flush=True)
    with Worker() as worker:
        last = rehearsal.layout.pp - 1
        stages = [rehearsal.stage(n, worker) for n in sorted({0, min(1, last), last})]  # other middle ones equal the 1
    print("\n".join(report.lines(stages, rehearsal.engine_bytes)))
    if args.json:
        args.json.write_text(json.dumps([asdict(stage) for stage in stages]))
    print(rehearsal.check_fits(stages))
    return FINISHED


class Worker:
    """A process that pretends to have GPUs. It rehearses one rank after the other, each in a fork of its own."""

    def __enter__(self) -> "Worker":
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed at the end
        command = [sys.executable, "-m", "megatron_rft.rehearsal.rank"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.errors}
        self.process = subprocess.Popen(command, text=True, **pipes)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()  # the end of its input ends it
        self.errors.close()

    def rehearse(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return the counts of a rank (rehearsal/rank.py, `answer`).

        Raises:
            UserError: the user's error that the rank reported.
            RunFailed: the rank failed in another way.
        """
        self.errors.seek(0)
        self.errors.truncate()
        with suppress(BrokenPipeError):  # it has ended: its stdout has, too
            print(json.dumps(question), file=self.process.stdin, flush=True)
        if not (line := self.process.stdout.readline().strip()):
            self.errors.seek(0)  # the processes share one position
            reason = self.errors.read().strip()[-3000:]
            raise RunFailed(f"rank {question['rank']} of {question['world']} failed in its rehearsal:\n{reason}")
        counts = json.loads(line)
        if "error" in counts:
            raise UserError(counts["error"])
        return counts


class Rehearsal:
    """The command's arguments, checked.

    Raises:
        UserError: the recipe or an argument is wrong.
    """

    def __init__(self, args: argparse.Namespace):
        self.args, self.device = args, device(args.device)
        if not 0 < args.fraction <= 1:
            raise UserError(f"--fraction: {args.fraction:g} is no share of the longest response: above 0, at most 1")
        self.recipe = load(args.recipe, args.overrides + ANY_WEIGHTS)
        if self.recipe.trainer == "generate":
            raise UserError(f"{args.recipe} is a recipe of trainer generate, which has no training step")
        self.folder = self._model_folder()
        self.layout = check(self.recipe, args.gpus, args.gpus_per_node).layout
        self.sizes = model_shape.read_shape(self.folder)
        self.planned = m = memory.MemoryPlan(self.recipe, self.sizes, self.layout, self.device.memory)
        # engines on the same device, by the plan's arithmetic
        self.engine_bytes = m.phases["training"] - m.state.total - max(m.activations, m.other)

    def __str__(self) -> str:
        model = self.recipe.model
        return f"{self.args.gpus} x {self.device.name}: {self.layout}; {model.path} ({self.sizes}), {model.precision}"

    def _model_folder(self) -> Path:
        path = self.recipe.model.path
        folder = model_shape.find_model(path)
        if folder is None:
            raise DataError(
                f"model.path: {path} is not on this machine, and rehearse needs its config.json: `hf download {path} "
                "config.json`, or model.path=FOLDER"
            )
        return folder

    def stage(self, number: int, worker: Worker) -> Stage:
        """Rehearse the first rank of a pipeline stage."""
        rank = number * (self.layout.world // self.layout.pp)
        names = ("recipe", "overrides", "device", "fraction", "training_only")
        given = {name: getattr(self.args, name) for name in names} | {"node": self.args.gpus_per_node}
        given |= {"world": self.layout.world, "rank": rank, "micro_batches": self._micro_batches(number)}
        found = worker.rehearse(given)
        stage = Stage(number, self.layout.pp, self.layout.vpp or 1, rank, found)
        took = f"{found['seconds']:.0f} s, {found['rss'] / GIB:.1f} GiB of this machine's memory"
        print(f"{stage.name}: rank {rank} rehearsed in {took}", flush=True)
        return stage

    def _micro_batches(self, stage: int) -> int:
        """One more micro-batch than are in flight together on this stage."""
        layout = self.layout
        count = self.args.micro_batches or max(2, layout.pp - stage + 1)
        if layout.vpp:  # the interleaved schedule requires a multiple of the pipeline's length
            count = -(-max(count, 2 * layout.pp) // layout.pp) * layout.pp
        return count

    def check_fits(self, stages: list[Stage]) -> str:
        """A line with the memory that is left.

        Raises:
            ConfigError: out of memory; names the stage, the phase, the largest categories and what would help.
        """
        stage, phase, total, parts = report.peak(stages)
        room = f"{report.gib(self.device.usable)} GiB ({self.device.name}, less {report.gib(RESERVED)})"
        needed = total + self.engine_bytes
        memory.check_fits(self.planned, phases=("generation",))
        if needed <= self.device.usable:
            left = report.gib(self.device.usable - needed)
            return f"fits {room}: {left} GiB are left at the peak, {stage.name} in {phase}"
        held = sorted((parts | {"engines": self.engine_bytes}).items(), key=lambda each: -each[1])[:3]
        largest = ", ".join(f"{name} {report.gib(size)}" for name, size in held)
        best = sorted((size, name) for name, size in memory.knobs(self.planned) if size < self.planned.largest)[:3]
        helps = "; ".join(f"{name} ({report.gib(self.planned.largest - size)} GiB less)" for size, name in best)
        raise ConfigError(
            f"out of memory: {stage.name} needs {report.gib(needed)} GiB in {phase}, and there are {room}; most of it: "
            f"{largest}. What would help, by the plan's arithmetic: {helps or 'more ranks, or a smaller model'}"
        )
