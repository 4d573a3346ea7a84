"""What the training loop of every run uses: folder, signals, evaluations, checkpoints, logging."""

import gc
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from copy import deepcopy
from pathlib import Path
from socket import gethostname
from typing import Any

import torch
import torch.distributed as dist

from megatron_rft.config import Recipe
from megatron_rft.conversion.folder import keep_one, model_fingerprint
from megatron_rft.conversion.lora import TENSORS
from megatron_rft.data.hub import model_folder
from megatron_rft.data.stream import Stream
from megatron_rft.evaluation.evaluate import unjudged
from megatron_rft.launching.ranks import PARENT
from megatron_rft.megatron import parallel, weights
from megatron_rft.megatron.checkpoint import Checkpointer
from megatron_rft.objectives.base import State, Update
from megatron_rft.plan.model_shape import read_shape
from megatron_rft.records import Batch, Prompt
from megatron_rft.rewards.registry import build as build_reward
from megatron_rft.tracking.observer import Observer, Trained
from megatron_rft.tracking.throughput import FreePages, Phases, Throughput, peak_tflops
from megatron_rft.tracking.tracker import Tracker
from megatron_rft.training import adapters, build
from megatron_rft.training.engines import EngineBuilder
from megatron_rft.training.episodes import around
from megatron_rft.training.evaluator import BestModel, Evaluator, headline
from megatron_rft.training.models import Models
from megatron_rft.training.monitor import ALARMS, Loads, Mean, MismatchBounds, NonFiniteGuard, Stragglers, due
from megatron_rft.utils.errors import ConfigError
from megatron_rft.utils.files import digest
from megatron_rft.utils.position import here
from megatron_rft.utils.processes import FIRST_INTERRUPT, STOP_SIGNALS, Interrupts


class StopSignal:
    """SIGTERM, SIGUSR1 (a time limit, a preemption) and Ctrl-C request an orderly end after the current step."""

    def __init__(self) -> None:
        self.received, self._interrupts = 0, Interrupts()
        for number in STOP_SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, _frame: Any) -> None:
        if number == signal.SIGINT and self._interrupts.again():
            raise KeyboardInterrupt  # a second Ctrl-C stops at once
        if number == signal.SIGINT and self.received != number and PARENT not in os.environ:
            os.write(2, FIRST_INTERRUPT.encode())  # a launcher says it itself
        self.received = number

    def agreed(self) -> int:
        """The signal's number if any rank got one, else 0. Collective."""
        heard = torch.tensor([self.received], dtype=torch.int32, device=parallel.device())
        dist.all_reduce(heard, dist.ReduceOp.MAX)
        return int(heard)


class TrainingRun:
    """A run in its folder: resuming, the end of each step, and the end of the run.

    Steps count from 1. Step 0 is the initial model.
    """

    def __init__(
        self,
        recipe: Recipe,
        tokenizer: Any,
        models: Models,
        stream: Stream,
        total_steps: int,
        stack: ExitStack,
        dropped: dict[str, int],
        given: dict[str, list[Prompt]],
        keeps_episodes: bool = False,
    ):
        """`stack`: closes the run. `dropped`: reason -> rows of data.train that were left out. `given`: problems of
        evaluations, by part. `keeps_episodes`: a resumed run does not play them again."""
        self.recipe, self.models, self.stream, self.total_steps = recipe, models, stream, total_steps
        self.folder, self.dropped, self.validates, self.done = Path(recipe.run.output_dir), dropped, recipe.validates, 0
        self.evaluator = self.weights = None
        if recipe.trainer == "rl" or recipe.validates or recipe.data.test:
            self._build_engine(tokenizer, stack, given, keeps_episodes)
        adapted = recipe.lora and recipe.lora.path
        self.inputs = inputs(recipe.models, adapted, stream) if dist.get_rank() == 0 else {}
        self.stop, self.phases = StopSignal(), Phases()
        self.guard = NonFiniteGuard(self.folder, recipe.faults.max_skipped_steps)
        self.best: BestModel | None = None
        if recipe.trainer == "offline":
            best, patience = self.folder / "best", recipe.evaluation.patience
            parallel.on_main(lambda: keep_one(best))
            self.best = BestModel(models.actor, best, build.tokenizer_folder(recipe.model), patience)
        options, folder = recipe.checkpoint, self.folder / "checkpoints"
        self.checkpoints = Checkpointer(folder, models.trained, options.keep, options.asynchronous, models.averages)
        self.tracker: Tracker | None = None
        self.observers: list[Observer] = []
        stack.push(lambda failed, *_: self.close(failing=failed is not None))

    # ---- start

    def _build_engine(self, tokenizer: Any, stack: ExitStack, given: dict[str, list[Prompt]], keeps: bool) -> None:
        """Build what samples and grades: the engine, which plays the recipe's environment, and the reward."""
        recipe, engines = self.recipe, EngineBuilder(self.recipe)
        self.reward = stack.enter_context(closing(build_reward(recipe.reward)))
        engine, self.weights = engines.build_beside(list(self.models.trained.values()))
        self.player = around(engine, engines, tokenizer, stack, self.weights if keeps else None)
        graded = self.player, tokenizer, self.reward, recipe.run.seed
        sampler = build.evaluation_sampler(recipe.evaluation, recipe.rollout, *graded)
        given = {part: prompts[: recipe.evaluation.limit] for part, prompts in given.items()}
        among = parallel.gather, *self.player.driver()
        self.evaluator = Evaluator(recipe.evaluation, sampler, self.folder / "evaluation", given, *among)

    def restore(self, state: State) -> State:
        """Load the newest intact checkpoint, if any. Returns the objective's state, else `state`. Sets `done`, the
        number of finished steps."""
        path, warnings = self.checkpoints.newest_intact()
        if path is not None:
            if self.models.actor.lora:
                parallel.on_main(lambda: adapters.check_base(path, self.inputs))
            facts, state = self.checkpoints.load(path)
            self.done, self.stream.position = facts["step"], facts["position"]
            self.guard.skipped = tuple(facts["skipped_steps"])
            if self.done > self.total_steps:
                why = f"the run in {self.folder} has done {self.done} steps, more than these {self.total_steps}"
                raise ConfigError(f"run.{'steps' if self.recipe.run.steps else 'epochs'}: {why}. Give at least as many")
            warnings += changed(facts.get("inputs", {}), self.inputs, self.done)
        if self.best:
            state = self.best.restore(state)
            self.total_steps = self.done if self.best.exhausted else self.total_steps
        about = {"name": self.recipe.run.name, "resolved": self.recipe.model_dump()}
        about |= {"resume_step": self.done + 1 if self.done else 0, "is_main": dist.get_rank() == 0}
        self.tracker = Tracker(self.folder, self.recipe.tracking, self.total_steps, **about)
        self.observers = self._observers()
        for warning in warnings:
            self.tracker.note(warning)
        if path is not None:
            self.tracker.note(f"resumed after step {self.done}, from {path}")
        for reason, count in self.dropped.items():
            self.tracker.note(f"data.train: {count} rows left out ({reason})")
        return state

    def _observers(self) -> list[Observer]:
        """In their order: each sees the metrics of those before it."""
        recipe, actor = self.recipe, self.models.actor
        peak, shares = recipe.tracking.peak_tflops or peak_tflops(), actor.layout.share_prompts
        sizes, hosts = read_shape(model_folder(recipe.model.path)), parallel.from_all_ranks(gethostname(), "start")
        observers = [FreePages()] if actor.device.type == "cpu" else []
        observers += [Stragglers(hosts, self.phases), Mean(), self.guard, self.phases]
        observers.append(Throughput(sizes, len(hosts), peak, shares))
        if actor.routers:
            observers.append(Loads(actor.routers, self.tracker.experts))
        if not recipe.rollout.staleness:
            observers.append(MismatchBounds(recipe.faults))  # else the engine has other weights than the trainer
        return observers + (deepcopy(list(ALARMS)) if recipe.tracking.alarms else [])

    @property
    def evaluates_at_start(self) -> bool:
        """Whether the model is evaluated before the first step."""
        return self.recipe.trainer != "sft" and not self.done and bool(self.validates or self.recipe.data.test)

    def evaluate_at_start(self) -> dict[str, float] | None:
        """Validate and test before the first step. Returns the test result, on a resumed run the recorded one."""
        if self.done and self.evaluator:
            return self.evaluator.recorded("test", 0)
        if not self.evaluates_at_start:
            return None
        metrics, test = {}, None
        with self.phases("evaluation"):
            if self.validates:
                metrics |= accuracy("evaluation", self._evaluated("validation", 0))
            if self.recipe.data.test:
                test = self._evaluated("test", 0)
                metrics |= accuracy("test", test)
        self.tracker.log(0, metrics | self.phases.take())
        return test

    def _evaluated(self, part: str, step: int) -> dict[str, float]:
        """The result of an evaluation, with a note if the grader failed on some answers."""
        result = self.evaluator(part, step)
        if result["errors"]:
            self.tracker.note(unjudged(result))
        return result

    # ---- one step

    def steps(self) -> Iterator[int]:
        """The remaining steps, until the last step or early stopping. The garbage collector leaves out what is there
        now: with half a million objects of all packages it would stop a rank, and so all, in mid-step."""
        gc.freeze()
        while self.done < self.total_steps:
            here.begin_step(self.done + 1)
            yield self.done + 1
            self.done += 1

    def optimizer_step(self, update: Update, mini_batch: Batch, step: int) -> None:
        """Train on one mini-batch of `update`, and measure the gradient norms of the loss's parts if they are due."""
        models, norms = self.models, {}
        batch, counts = update.computed(mini_batch, models.skips_zero_advantages)
        second = models.second(update, batch)
        if update.parts and due(models.norms_every, step):
            with self.phases("part_norms"):
                norms = models.part_norms(update, batch, counts, second)
        with self.phases("verification" if update.name == "verification" else "training"):
            metrics = norms | models.step(update, batch, counts, second)
        trained = Trained(step, update.name, mini_batch, batch, metrics)
        for observer in self.observers:
            observer.trained(trained)

    def evaluation_due(self, step: int) -> bool:
        every = self.recipe.evaluation.every
        return self.validates and (step == self.total_steps or bool(every) and step % every == 0)

    def comparison_due(self, step: int) -> bool:
        """Whether the engine's weights are compared with the actor's bit by bit after this step."""
        every = self.recipe.faults.compare_weights_every
        return bool(every) and step % every == 0

    def evaluate(self, step: int) -> dict[str, float]:
        """Validation metrics, if this step has an evaluation."""
        if not self.evaluation_due(step):
            return {}
        with self.phases("evaluation"):
            summary = self._evaluated("validation", step)
        if self.best:
            self.best.judge(summary["pass_at_1"], step)
            self.total_steps = step if self.best.exhausted else self.total_steps  # the last: it has a checkpoint
        return accuracy("evaluation", summary)

    def end_of_step(self, step: int, state: State, metrics: dict[str, float], more: Callable[[], State] = dict) -> bool:
        """Log, and save if due. Returns whether a signal stops the run; the checkpoint is then on disk. `more`
        returns further state for a checkpoint."""
        stopping, every = self.stop.agreed(), self.recipe.checkpoint.every
        for observer in self.observers:
            if warning := observer.end_of_step(step, metrics):
                self.tracker.note(warning, alarm=True)
        # Log before the checkpoint: after a kill in between, the step is repeated and its line is replaced.
        self.tracker.log(step, metrics)
        with self.phases("checkpoint"):
            if stopping or step == self.total_steps or (every and step % every == 0):
                self.save(step, state | more())
            elif self.checkpoints.saving:
                self.checkpoints.poll()
        if stopping:
            self.checkpoints.wait()
            name = signal.Signals(stopping).name
            self.tracker.note(f"stopped by {name} after step {step}; the same command resumes")
        return bool(stopping)

    def save(self, step: int, state: State) -> None:
        self.tracker.sync()
        if self.best:
            state = state | self.best.state()
        facts = {"position": self.stream.position, "skipped_steps": self.guard.skipped, "inputs": self.inputs}
        self.checkpoints.save(step, facts, state)

    # ---- end

    def conclude(self, publish: Callable[[int, bool], object], before: dict[str, float] | None) -> None:
        """Test and export the best model, or the last. `publish`: `Batches.publish`. `before`: the test result of the
        initial model."""
        step = self.total_steps
        if self.best and (loaded := self.best.load()):
            step, best = loaded
            self.tracker.note(f"the best model is that of step {step}: validation pass@1 {best:.3f}")
        after = None
        if self.recipe.data.test:
            publish(step, True)
            with self.phases("evaluation"):
                after = self._evaluated("test", self.total_steps)
        actor, tokenizer = self.models.actor, build.tokenizer_folder(self.recipe.model)
        weights.save_folder(actor.stream(), self.folder / "export", actor.hf_config, tokenizer)
        self.checkpoints.wait()
        self.tracker.note(f"model in Hugging Face format: {self.folder / 'export'}")
        if actor.lora:
            adapters.export(actor, self.folder / "adapters", self.recipe.model, self.recipe.run.seed)
            self.tracker.note(f"its adapters in PEFT's format: {self.folder / 'adapters'}")
        if after and dist.get_rank() == 0:
            print(headline(before, after), flush=True)

    def close(self, failing: bool) -> None:
        self.checkpoints.close(failing)
        if self.tracker is not None:
            self.tracker.close()


def accuracy(prefix: str, summary: dict[str, float]) -> dict[str, float]:
    return {f"{prefix}/pass@1": summary["pass_at_1"], f"{prefix}/pass@1_se": summary["standard_error"]}


def inputs(models: dict[str, str], adapters: str | None, stream: Stream) -> dict[str, str]:
    """Digests of what every start of a run reads again, by option."""
    digests = {name: model_fingerprint(model_folder(path)) for name, path in models.items()}
    if adapters:
        digests["lora.path"] = digest(Path(adapters) / TENSORS)["sha256"]
    return digests | {"data.train": stream.digest()}


def changed(saved: dict[str, str], now: dict[str, str], step: int) -> list[str]:
    """A sentence about each input that differs from that of a checkpoint."""
    return [
        f"{name} is no longer what it was in the checkpoint of step {step}: the run continues with the current version"
        for name in now
        if name in saved and saved[name] != now[name]
    ]
