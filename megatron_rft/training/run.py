"""What the training loop of every run uses: folder, signals, NonFiniteGuard, evaluations, checkpoints, logging."""

import signal
import socket
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import torch.distributed as dist

from megatron_rft.config import Model, Recipe
from megatron_rft.conversion import fingerprint
from megatron_rft.data.hub import model_folder
from megatron_rft.data.stream import Stream
from megatron_rft.megatron import parallel, weights
from megatron_rft.megatron.checkpoint import Checkpointer
from megatron_rft.objectives.base import State, Update, with_gradient
from megatron_rft.plan.parameters import Sizes
from megatron_rft.records import Batch
from megatron_rft.tracking.phases import Phases
from megatron_rft.tracking.throughput import Throughput, device_name, peak_tflops
from megatron_rft.tracking.tracker import Tracker
from megatron_rft.training import mismatch_alarm
from megatron_rft.training.alarms import Alarms
from megatron_rft.training.build import tokenizer_folder
from megatron_rft.training.early_stopping import BestModel
from megatron_rft.training.evaluator import Evaluator, headline
from megatron_rft.training.models import Models
from megatron_rft.training.stopping import NonFiniteGuard, StopSignal
from megatron_rft.training.stragglers import Stragglers
from megatron_rft.utils.device import has_cuda_device
from megatron_rft.utils.host_memory import return_free_pages
from megatron_rft.utils.position import here


class Averages:
    """Means over the optimizer steps of one training step, named policy/loss, verification/grad_norm and so on. Names
    that contain a slash are kept."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = defaultdict(list)

    def add(self, update: str, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._values[name if "/" in name else f"{update}/{name}"].append(value)

    def take(self) -> dict[str, float]:
        values, self._values = self._values, defaultdict(list)
        return {name: sum(many) / len(many) for name, many in values.items()}


class Run:
    """A run in its folder: resuming, the end of each step, and the end of the run.

    Steps count from 1. Step 0 is the initial model.
    """

    def __init__(
        self,
        recipe: Recipe,
        models: Models,
        stream: Stream,
        total_steps: int,
        evaluator: Evaluator | None = None,
        dropped: dict[str, int] | None = None,
    ):
        """`dropped`: reason -> rows of data.train that were left out."""
        self.models, self.stream, self.total_steps, self.evaluator = models, stream, total_steps, evaluator
        self.options, self.resolved = recipe.run, recipe.model_dump()
        self.tracking, self.evaluation, self.faults = recipe.tracking, recipe.evaluation, recipe.faults
        self.checkpoint_every, self.validates = recipe.checkpoint.every, recipe.validates
        self.tests, self.evaluates_first = recipe.data.test is not None, recipe.trainer != "sft"
        self.compares_logprobs = not recipe.rollout.staleness
        self.skips_zero_advantages = recipe.batching.skip_zero_advantages == "auto"
        self.folder, self.tokenizer_folder = Path(recipe.run.output_dir), tokenizer_folder(recipe.model)
        self.done, self.dropped = 0, dropped or {}
        self.inputs = inputs(recipe.model, stream) if dist.get_rank() == 0 else {}
        self.stop = StopSignal()
        self.phases, self.averages = Phases(), Averages()
        self.stragglers = Stragglers(parallel.from_all_ranks(socket.gethostname(), "start"))
        self.alarms = Alarms() if recipe.tracking.alarms else None
        sizes, given = Sizes.read(model_folder(recipe.model.path)), recipe.tracking.peak_tflops
        self.throughput = Throughput(sizes, dist.get_world_size(), given or peak_tflops(device_name()))
        self.guard = NonFiniteGuard(self.folder, recipe.faults.max_skipped_steps)
        self.foreseen: dict[str, float] | None = None  # metrics of the gradient of `compute_foreseen`
        self.best: BestModel | None = None
        if recipe.trainer == "offline":
            patience = recipe.evaluation.patience
            self.best = BestModel(models.actor, self.folder / "best", self.tokenizer_folder, patience)
        options = recipe.checkpoint
        folder = self.folder / "checkpoints"
        self.checkpoints = Checkpointer(folder, models.trained, options.keep, options.asynchronous, models.averages)
        self.tracker: Tracker | None = None

    # ---- start

    def restore(self, state: State) -> State:
        """Load the newest intact checkpoint, if any. Returns the objective's state, else `state`. Sets `done`, the
        number of finished steps."""
        path, warnings = self.checkpoints.newest_intact()
        if path is not None:
            facts, state = self.checkpoints.load(path)
            self.done, self.stream.position = facts["step"], facts["position"]
            self.guard.total = facts["skipped_steps"]
            warnings += changed(facts.get("inputs", {}), self.inputs, self.done)
        if self.best:
            self.best.selection, state = self.best.selection.out_of(state)
        self.tracker = Tracker(
            self.folder,
            self.tracking,
            self.total_steps,
            resume_step=self.done + 1 if self.done else 0,
            is_main=dist.get_rank() == 0,
            name=self.options.name,
            resolved=self.resolved,
        )
        for told in warnings:
            self.tracker.note(told)
        if path is not None:
            self.tracker.note(f"resumed after step {self.done}, from {path}")
        for reason, count in self.dropped.items():
            self.tracker.note(f"data.train: {count} rows left out ({reason})")
        return state

    @property
    def evaluates_at_start(self) -> bool:
        """Whether the model is evaluated before the first step."""
        return self.evaluator is not None and self.evaluates_first and not self.done and (self.validates or self.tests)

    def evaluate_at_start(self) -> dict[str, float] | None:
        """Validate and test before the first step. Returns the test result, on a resumed run the recorded one."""
        if self.done and self.evaluator and self.evaluates_first:
            return self.evaluator.recorded("test", 0)
        if not self.evaluates_at_start:
            return None
        metrics, test = {}, None
        with self.phases("evaluation"):
            if self.validates:
                metrics |= accuracy("evaluation", self.evaluator("validation", 0))
            if self.tests:
                test = self.evaluator("test", 0)
                metrics |= accuracy("test", test)
        self.tracker.log(0, metrics | self.phases.take())
        return test

    # ---- one step

    def steps(self) -> Iterator[int]:
        """The remaining steps, until the last step or early stopping."""
        for step in range(self.done + 1, self.total_steps + 1):
            if self.best and self.best.selection.exhausted:
                return
            here.begin_step(step)
            yield step

    def compute_foreseen(self, update: Update | None) -> None:
        """Compute the gradient of an update of `Objective.foreseen`. It stays in the gradient buffers, which nothing
        else uses before the step's first optimizer step."""
        self.foreseen = None
        if update is None:
            return
        (mini_batch,) = update.steps()
        batch, counts, measured = self._computed(update, mini_batch)
        with self.phases("verification"):
            actor = self.models.trained[update.model]
            self.foreseen = actor.backward(batch, update.loss, counts, update.outputs, measured=measured)

    def optimizer_step(self, update: Update, mini_batch: Batch, step: int) -> dict[str, float]:
        """Train on one mini-batch of `update`. Returns the gradient norms of the loss's parts if they are due."""
        actor, norms, found = self.models.trained[update.model], self.models.norms, {}
        batch, counts, measured = self._computed(update, mini_batch)
        second = self.models.second(update, batch)
        foreseen, self.foreseen = self.foreseen if update.foreseen else None, None
        if norms and norms.due(update, step):
            with self.phases("part_norms"):
                found = norms.measure(actor, update, batch, counts, second)
        with self.phases("verification" if update.name == "verification" else "training"):
            metrics = actor.step(
                batch,
                update.loss,
                counts,
                update.outputs,
                update.learning_rate,
                second,
                update.moments,
                update.scale,
                foreseen,
                measured,
            )
        self.guard.note(metrics, mini_batch, step)
        if "no_gradient" in mini_batch.sequences:
            metrics["computed_share"] = len(batch) / len(mini_batch)
        self.averages.add(update.name, metrics)
        self.throughput.trained(batch, actor.layout.share_prompts)
        return found

    def _computed(self, update: Update, mini_batch: Batch) -> tuple[Batch, dict[str, float], dict[str, float] | None]:
        """The sequences to compute, the counts of the whole mini-batch, and those of the computed sequences if they are
        fewer."""
        batch = with_gradient(mini_batch) if self.skips_zero_advantages else mini_batch
        return batch, update.counts(mini_batch), None if batch is mini_batch else update.counts(batch)

    def evaluation_due(self, step: int) -> bool:
        every = self.evaluation.every
        validates = self.evaluator is not None and self.validates
        return validates and (step == self.total_steps or bool(every) and step % every == 0)

    def comparison_due(self, step: int) -> bool:
        """Whether the engine's weights are compared with the actor's bit by bit after this step."""
        every = self.faults.compare_weights_every
        return bool(every) and step % every == 0

    def evaluate(self, step: int) -> dict[str, float]:
        """Validation metrics, if this step has an evaluation."""
        if not self.evaluation_due(step):
            return {}
        with self.phases("evaluation"):
            found = self.evaluator("validation", step)
        if self.best:
            self.best.judge(found["pass_at_1"], step)
            if self.best.selection.exhausted:
                self.total_steps = step  # end_of_step writes the last checkpoint
        return accuracy("evaluation", found)

    def end_of_step(
        self, step: int, state: State, metrics: dict[str, float], pending: Callable[[], State] = dict
    ) -> bool:
        """Log, and save if due. Returns whether a signal stops the run; the checkpoint is then on disk. `pending`
        returns further state for a checkpoint."""
        if not has_cuda_device():
            return_free_pages()
        stopping, every = self.stop.agreed(), self.checkpoint_every
        ranks, slow = self.stragglers.take(self.phases.work(), step)
        metrics = (
            metrics | ranks | self.averages.take() | {"faults/skipped_steps": self.guard.total} | self.phases.take()
        )
        metrics |= self.throughput.take(metrics)
        if self.compares_logprobs and (told := mismatch_alarm.check(metrics, self.faults, step)):
            self.tracker.note(told)
        for told in [slow] * bool(slow) + (self.alarms.check(metrics, step) if self.alarms else []):
            self.tracker.note(told)
        # Log before the checkpoint: after a kill in between, the step is repeated and its line is replaced.
        self.tracker.log(step, metrics)
        with self.phases("checkpoint"):
            if stopping or step == self.total_steps or (every and step % every == 0):
                self.save(step, state | pending())
            else:
                self.checkpoints.poll()
        if stopping:
            self.checkpoints.wait()
            name = signal.Signals(stopping).name
            self.tracker.note(f"stopped by {name} after step {step}; the same command resumes")
        return bool(stopping)

    def save(self, step: int, state: State) -> None:
        self.tracker.sync()
        if self.best:
            state = self.best.selection.into(state)
        facts = {"position": self.stream.position, "skipped_steps": self.guard.total, "inputs": self.inputs}
        self.checkpoints.save(step, facts, state)

    # ---- end

    def conclude(self, publish: Callable[[int, bool], object], before: dict[str, float] | None) -> None:
        """Test and export the best model, or the last. `publish`: `Batches.publish`. `before`: the test result of the
        initial model."""
        step = self.total_steps
        if self.best and (found := self.best.load()):
            step, best = found
            self.tracker.note(f"the best model is that of step {step}: validation pass@1 {best:.3f}")
        after = None
        if self.evaluator and self.tests:
            publish(step, True)
            with self.phases("evaluation"):
                after = self.evaluator("test", self.total_steps)
        actor = self.models.actor
        weights.save_folder(actor.stream(), self.folder / "export", actor.hf_config, self.tokenizer_folder)
        self.checkpoints.wait()
        if dist.get_rank() == 0:
            self._plot()
        self.tracker.note(f"model in Hugging Face format: {self.folder / 'export'}")
        if after and dist.get_rank() == 0:
            print(headline(before, after), flush=True)

    def _plot(self) -> None:
        if self.tracking.plot:
            from megatron_rft.report.pictures import draw_run  # a slow import

            self.tracker.note(f"curves: {draw_run(self.folder)}")

    def close(self) -> None:
        self.checkpoints.close()
        if self.tracker is not None:
            self.tracker.close()


def accuracy(prefix: str, summary: dict[str, float]) -> dict[str, float]:
    return {f"{prefix}/pass@1": summary["pass_at_1"], f"{prefix}/pass@1_se": summary["standard_error"]}


def inputs(model: Model, stream: Stream) -> dict[str, str]:
    """Digests of what every start of a run reads again, by option."""
    paths = {"model.path": model.path, "model.reference": model.reference}
    models = {name: fingerprint.of_model(model_folder(path)) for name, path in paths.items() if path}
    return models | {"data.train": stream.digest()}


def changed(saved: dict[str, str], now: dict[str, str], step: int) -> list[str]:
    """A sentence about each input that differs from that of a checkpoint."""
    return [
        f"{name} is no longer what it was in the checkpoint of step {step}: the run goes on with what is there now"
        for name in now
        if name in saved and saved[name] != now[name]
    ]
