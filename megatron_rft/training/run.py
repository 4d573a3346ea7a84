"""What every run has besides its loop: its folder, its signals, its patience with bad steps, its place after a restart.

Exit statuses, the same on every rank: FINISHED, STOPPED (a signal came: a checkpoint was written, the same command
goes on from it).
"""

import os
import signal
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from megatron_rft.config import Recipe, difference, dump, load
from megatron_rft.data.hub import model_folder
from megatron_rft.megatron.actor import Actor
from megatron_rft.megatron.checkpoint import Checkpointer, latest
from megatron_rft.megatron.ema import MovingAverage
from megatron_rft.megatron.second_distribution import Recorded, Second
from megatron_rft.objectives.base import State, Update
from megatron_rft.plan.parameters import Sizes
from megatron_rft.records import Batch
from megatron_rft.tracking.phases import Phases
from megatron_rft.tracking.throughput import Throughput, device_name, peak_tflops
from megatron_rft.tracking.tracker import Tracker
from megatron_rft.training import mismatch_alarm
from megatron_rft.training.build import Evaluator
from megatron_rft.utils.errors import ConfigError, RunFailed

FINISHED, STOPPED = 0, 75
RECIPE_FILE = "recipe.yaml"


class Stream(Protocol):
    """Where the data comes from; `position` alone says what comes next."""

    position: int


class StopSignal:
    """SIGTERM, SIGUSR1 (a time limit, a preemption) and Ctrl-C ask for an orderly end after the step under way."""

    def __init__(self) -> None:
        self.received = 0
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, _frame: Any) -> None:
        if self.received == number == signal.SIGINT:
            raise KeyboardInterrupt  # the second time somebody means it
        self.received = number

    def agreed(self) -> int:
        """The signal's number if any rank got one, else 0. All ranks call it together and hear the same."""
        heard = torch.tensor([self.received], dtype=torch.int32)
        if dist.get_backend() == "nccl":
            heard = heard.cuda()
        dist.all_reduce(heard, dist.ReduceOp.MAX)
        return int(heard)


class Patience:
    """Bears a bounded number of skipped optimizer steps in a row, then ends the run with the batch on disk."""

    def __init__(self, output_dir: Path, bound: int):
        self.output_dir, self.bound, self.in_a_row, self.total = output_dir, bound, 0, 0

    def note(self, metrics: dict[str, float], batch: Batch, step: int) -> None:
        if not metrics["skipped"]:
            self.in_a_row = 0
            return
        self.in_a_row, self.total = self.in_a_row + 1, self.total + 1
        if self.in_a_row <= self.bound:
            return
        path = self.output_dir / f"failed_batch_step_{step:06d}.safetensors"
        if dist.get_rank() == 0:
            save_file(batch.state_dict(), path)
        raise RunFailed(
            f"step {step}: loss {metrics['loss']}, gradient norm {metrics['grad_norm']}: not finite {self.in_a_row} "
            f"times in a row, more than faults.max_skipped_steps = {self.bound}. The batch is in {path}; the newest "
            "checkpoint is from before these steps. A lower optimizer.lr, or fp32, is what usually helps"
        )


def claim_folder(recipe: Recipe) -> Path:
    """The run's folder, with its resolved recipe inside. Refuses a folder that holds another run.

    Called by one process before any model is built.

    Raises:
        ConfigError: another recipe's run is in there, or one where run.resume=never, or none where it is "must".
    """
    folder = Path(recipe.run.output_dir)
    stored, mode = folder / RECIPE_FILE, recipe.run.resume
    if stored.is_file():
        if mode == "never":
            raise ConfigError(f"run.output_dir {folder} holds a run and run.resume is 'never': choose another folder")
        if begun(folder) and (changed := difference(load(stored), recipe)):
            raise ConfigError(
                f"run.output_dir {folder} holds another run; this one differs in {', '.join(changed)}. "
                "Choose another run.output_dir, or take these back to resume it"
            )
    elif mode == "must":
        raise ConfigError(f"run.resume is 'must', and there is no run in run.output_dir {folder}")
    elif folder.is_dir() and (found := sorted(p.name for p in folder.iterdir() if p.name != "launch")):
        raise ConfigError(
            f"run.output_dir {folder} holds something else ({', '.join(found[:3])} ...): choose another folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    new = stored.with_suffix(f".{os.getpid()}.new")  # generating workers share a folder, and read it meanwhile
    new.write_text(dump(recipe))
    new.replace(stored)
    return folder


def begun(folder: Path) -> bool:
    """Whether a run has left more than one that was refused at its start. Others may be at work there: a generating
    worker, the writer of a start that was killed. What vanishes meanwhile does not count."""
    for place, folders, files in os.walk(folder):
        if Path(place) == folder:
            folders[:] = set(folders) - {"launch", "engines"}
            files = set(files) - {RECIPE_FILE}
        for name in files:
            with suppress(FileNotFoundError):
                if Path(place, name).stat().st_size:
                    return True
    return False


class Averages:
    """Means over the optimizer steps of one training step, as policy/loss, verification/grad_norm and so on. A name
    that has a section already keeps it."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = defaultdict(list)

    def add(self, update: str, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._values[name if "/" in name else f"{update}/{name}"].append(value)

    def take(self) -> dict[str, float]:
        values, self._values = self._values, defaultdict(list)
        return {name: sum(many) / len(many) for name, many in values.items()}


class Run:
    """A run in its folder: where it starts, what happens at the end of each step, how it ends.

    Steps count from 1: step n is done when n updates of the policy are. Step 0 is the model as it came.
    """

    def __init__(
        self,
        recipe: Recipe,
        models: dict[str, Actor],
        stream: Stream,
        total_steps: int,
        averages: dict[str, MovingAverage] | None = None,
    ):
        self.recipe, self.models, self.stream, self.total_steps = recipe, models, stream, total_steps
        self.folder = Path(recipe.run.output_dir)
        self.done = 0
        self.stop = StopSignal()
        self.phases, self.averages = Phases(), Averages()
        sizes, given = Sizes.read(model_folder(recipe.model.path)), recipe.tracking.peak_tflops
        self.throughput = Throughput(sizes, dist.get_world_size(), given or peak_tflops(device_name()))
        self.patience = Patience(self.folder, recipe.faults.max_skipped_steps)
        options = recipe.checkpoint
        folder = self.folder / "checkpoints"
        self.checkpoints = Checkpointer(folder, models, options.keep, options.asynchronous, averages)
        self.tracker: Tracker | None = None

    # ---- start

    def restore(self, state: State) -> tuple[State, int]:
        """The objective's state and the number of steps done: the newest checkpoint's, else `state` and 0."""
        path = latest(self.folder / "checkpoints")
        if path is not None:
            facts, state = self.checkpoints.load(path)
            self.done, self.stream.position = facts["step"], facts["position"]
            self.patience.total = facts["skipped_steps"]
        self.tracker = Tracker(
            self.folder,
            self.recipe.tracking,
            self.total_steps,
            resume_step=self.done + 1 if self.done else 0,
            is_main=dist.get_rank() == 0,
            name=self.recipe.run.name,
            recipe=self.recipe.model_dump(),
        )
        if path is not None:
            self.tracker.note(f"resumed after step {self.done}, from {path}")
        return state, self.done

    def note_dropped(self, source: str, dropped: dict[str, int]) -> None:
        for reason, count in dropped.items():
            self.tracker.note(f"{source}: {count} rows left out ({reason})")

    def evaluate_at_start(self, evaluator: Evaluator) -> dict[str, float] | None:
        """Validation and test before the first step; returns the test's, from the record where the run is resumed."""
        if self.done:
            return evaluator.recorded("test", 0)
        metrics, test = {}, None
        with self.phases("evaluation"):
            if self.recipe.validates:
                metrics |= accuracy("evaluation", evaluator("validation", 0))
            if self.recipe.data.test:
                test = evaluator("test", 0)
                metrics |= accuracy("test", test)
        if metrics:
            self.tracker.log(0, metrics | self.phases.take())
        return test

    # ---- one step

    def optimizer_step(self, update: Update, batch: Batch, step: int, second: Second | Recorded | None = None) -> None:
        """One mini-batch of `update`; `second` is the distribution that it wants beside."""
        metrics = self.models[update.model].step(
            batch, update.loss, update.counts(batch), update.outputs, update.learning_rate, second, update.moments
        )
        self.patience.note(metrics, batch, step)
        self.averages.add(update.name, metrics)
        self.throughput.trained(batch.lengths)

    def evaluation_due(self, step: int) -> bool:
        every = self.recipe.evaluation.every
        return self.recipe.validates and (step == self.total_steps or bool(every) and step % every == 0)

    def evaluate_if_due(self, evaluator: Evaluator, step: int) -> dict[str, float]:
        """Metrics of the validation problems, where this step has an evaluation."""
        if not self.evaluation_due(step):
            return {}
        with self.phases("evaluation"):
            return accuracy("evaluation", evaluator("validation", step))

    def end_of_step(
        self, step: int, state: State, metrics: dict[str, float], pending: Callable[[], State] = dict
    ) -> bool:
        """Log, save when it is due, and say whether a signal asks to stop (the checkpoint is then on disk). `pending`:
        what else a checkpoint must hold, asked for when one is written."""
        stopping, every = self.stop.agreed(), self.recipe.checkpoint.every
        metrics = metrics | self.averages.take() | {"faults/skipped_steps": self.patience.total} | self.phases.take()
        metrics |= self.throughput.take(metrics)
        if not self.recipe.rollout.staleness and (told := mismatch_alarm.check(metrics, self.recipe.faults, step)):
            self.tracker.note(told)
        self.tracker.log(
            step, metrics
        )  # before the checkpoint: killed in between, the step and its line are done again
        with self.phases("checkpoint"):
            if stopping or step == self.total_steps or (every and step % every == 0):
                self.save(step, state | pending())
            else:
                self.checkpoints.poll()
        if stopping:
            self.checkpoints.wait()
            name = signal.Signals(stopping).name
            self.tracker.note(f"stopped by {name} after step {step}; the same command goes on from here")
        return bool(stopping)

    def save(self, step: int, state: State) -> None:
        self.tracker.sync()
        facts = {"position": self.stream.position, "skipped_steps": self.patience.total}
        self.checkpoints.save(step, facts, state)

    # ---- end

    def evaluate_at_end(self, evaluator: Evaluator) -> dict[str, float] | None:
        """The test of the final model; its validation is in the last step's line."""
        with self.phases("evaluation"):
            return evaluator("test", self.total_steps) if self.recipe.data.test else None

    def finish(self) -> None:
        self.checkpoints.wait()
        if self.recipe.tracking.plot and dist.get_rank() == 0:
            from megatron_rft.report.plots import draw  # half a second that only this needs

            self.tracker.note(f"curves: {draw(self.folder, self.recipe.run.name)}")
        self.tracker.note(f"model in Hugging Face format: {self.folder / 'export'}")

    def close(self) -> None:
        self.checkpoints.close()
        if self.tracker is not None:
            self.tracker.close()


def accuracy(prefix: str, summary: dict[str, float]) -> dict[str, float]:
    return {f"{prefix}/pass@1": summary["pass_at_1"], f"{prefix}/pass@1_se": summary["standard_error"]}
