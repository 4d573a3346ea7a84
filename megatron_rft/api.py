"""The package from Python: what the commands do, as functions for notebooks, sweeps and services. No torch at import.

A run is a process of its own, so that a notebook keeps its memory and its signals. Its steps come back through
RUN/metrics.jsonl, its output through a pipe.
"""

import inspect
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megatron_rft.config import AnyRecipe, Recipe, dump, load
from megatron_rft.config.messages import argument
from megatron_rft.config.sections import Count
from megatron_rft.responses import Prompt, Score
from megatron_rft.utils.end_with_parent import die_with
from megatron_rft.utils.errors import FINISHED, STOPPED, USER_ERROR, ConfigError, DataError, RunFailed, UserError

if TYPE_CHECKING:
    from megatron_rft.conversion.convert import Conversion
    from megatron_rft.evaluation.evaluate import EvalResult
    from megatron_rft.report.runs import RecordedRun

Place = str | Path
Callbacks = Sequence[Callable[[int, dict[str, float]], object]]
ERROR = "error: "
PROBE = {"run": {"output_dir": "-", "steps": 1}, "model": {"path": "-"}, "data": {"train": "-"}}


def train(recipe: AnyRecipe, nproc: int | None = None, callbacks: Callbacks = (), **sections: Any) -> "RecordedRun":
    """Train a recipe, or resume its run, until its last step. Ctrl-C ends it after a checkpoint; a second one kills it.

    Args:
        recipe: as for `load`.
        **sections: as for `load`.
        nproc: ranks on this machine. None: one, without a launcher.
        callbacks: each is called with the step, from 0 (the first evaluation) on, and its metrics by name
            (docs/metrics.md), in this process. The run ends after a checkpoint if one returns True or raises.

    Returns:
        The run's metrics, samples and alarms, as `runs.read(folder)` does.

    Raises:
        UserError: what `megatron-rft train` refuses with status 2, such as a ConfigError or a DataError.
        RunFailed: the run failed; the message says why.
        KeyboardInterrupt: Ctrl-C, after the checkpoint. The same call continues from there.
    """
    from megatron_rft.report import runs

    return runs.read(_run("train", load(recipe, **sections), nproc, callbacks))


def generate(recipe: AnyRecipe, nproc: int | None = None, **sections: Any) -> Path:
    """Sample and grade trajectories into a store, with a recipe of the trainer `generate`. Returns the store's folder.
    Arguments and errors are those of `train`."""
    return _run("generate", load(recipe, **sections), nproc)


def evaluate(
    recipe: AnyRecipe, model: Place | None = None, like: Place | None = None, out: Place | None = None, **sections: Any
) -> "list[EvalResult]":
    """Evaluate a model on the recipe's test and validation problems and benchmarks, in this process.

    Args:
        recipe: as for `load`.
        **sections: as for `load`.
        model: a Hugging Face folder or hub name, a Megatron checkpoint, or a run for its newest. None: RUN/export.
        like: a model with config.json and tokenizer, if `model` has none.
        out: folder of results and completions. None: RUN/evaluation/MODEL.

    Returns:
        A result for each part: pass_at_1 (share of right completions), standard_error, completions with their texts ...

    Raises:
        ConfigError, DataError: the recipe, the problems or the model cannot be used.
    """
    from megatron_rft.commands import evaluate as command

    names = [None if name is None else str(name) for name in (model, like)]
    return command.evaluate(load(recipe, **sections), *names, None if out is None else Path(out))[0]


def grade(
    rows: Sequence[Mapping[str, Any]], responses: Sequence[str], reward: Mapping[str, Any] | Callable[..., Any]
) -> list[Score]:
    """Grade one response to each row, as a run would.

    Args:
        rows: problems with `question`, `answer` (text) and what the reward reads besides, such as `tests`.
        responses: their texts, in the same order.
        reward: the section of a recipe, such as {"kind": "math"}, or a function of (prompt, text).

    Returns:
        A `Score` for each: reward, reason, and `error` if the grader failed.

    Raises:
        ConfigError: an argument or an option of the reward is wrong.
        DataError: a row cannot be used, or there are not as many rows as responses.
        RunFailed: a reward is NaN or infinite.
    """
    from megatron_rft.rewards import registry
    from megatron_rft.rewards.base import check_finite

    responses = argument("responses", list[str], responses if isinstance(responses, str) else list(responses))
    if len(rows) != len(responses):
        raise DataError(f"{len(rows)} rows, but {len(responses)} responses: each row has one response")
    section = reward if callable(reward) else argument("reward", dict[str, Any], reward)
    prompts = [_problem(number, row) for number, row in enumerate(rows)]
    with closing(registry.build(load(PROBE, reward=section).reward)) as grader:
        scores = grader(prompts, responses)
    for prompt, score, text in zip(prompts, scores, responses, strict=True):
        check_finite(score, "grade", prompt, 0, text)
    return scores


def _problem(number: int, row: Any) -> Prompt:
    from megatron_rft.data.prompts import reference_answer

    if not isinstance(row, Mapping):
        raise DataError(f"rows[{number}]: a row has named fields, such as question and answer, and is not {row!r:.60}")
    try:
        question, answer = str(row.get("question", "")), reference_answer(row.get("answer"))
    except ValueError as error:
        raise DataError(f"rows[{number}]: the field 'answer' {error}") from None
    return Prompt(number, (), question, answer, dict(row), question=question)


def convert(source: Place, out: Place, to: str | None = None, like: Place | None = None) -> "Conversion | None":
    """Convert a checkpoint, compare the copy with it bit by bit, and only then give it its name.

    Args:
        source: a Hugging Face folder or hub name, a torch_dist checkpoint, or a run.
        out: a new folder.
        to: hf, megatron or peft. None: not the source's format.
        like: a model with config.json and tokenizer, if the source has none.

    Returns:
        Numbers of tensors and bytes, and the model's digest; None for adapters (peft).

    Raises:
        ConfigError, DataError: an argument or the source cannot be used, or `out` exists.
        RunFailed: the copy differs.
    """
    from megatron_rft.commands import convert as command

    to = argument("to", Literal["hf", "megatron", "peft"] | None, to)
    return command.convert(str(source), Path(out), to, None if like is None else str(like))


# ---- a run in another process


def _run(command: str, recipe: Recipe, nproc: int | None, callbacks: Callbacks = ()) -> Path:
    """Run a recipe in a process, and return its folder. Checks it here first, so that what is wrong is raised here."""
    from megatron_rft.commands import train
    from megatron_rft.plan import check

    train.check_command(recipe.trainer, command)
    check(recipe, argument("nproc", Count | None, nproc) or 1, starts=True)
    try:
        for callback in (callbacks := list(callbacks)):
            inspect.signature(callback).bind(0, {})
    except (TypeError, ValueError):
        raise ConfigError(f"callbacks: {callbacks!r:.80} is not a list of functions of step and metrics") from None
    if callbacks and recipe.tracking.progress == "none":
        raise ConfigError("tracking.progress: none, but callbacks follow the lines of the steps: leave it out")
    folder = Path(recipe.run.output_dir)
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", prefix="megatron-rft-") as file:
        file.write(dump(recipe, given=True))
        file.flush()
        words = [command, file.name, *(["--nproc", str(nproc)] if nproc else [])]
        process = subprocess.Popen(
            [sys.executable, "-m", "megatron_rft", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # a terminal's Ctrl-C reaches this process alone
            preexec_fn=partial(die_with, os.getpid(), signal.SIGTERM),  # if this process ends, the run saves
        )
        error = _followed(process, folder, callbacks)
    if process.returncode not in (FINISHED, STOPPED):
        kind = UserError if process.returncode == USER_ERROR else RunFailed
        raise kind(error or f"the run ended with status {process.returncode}")
    return folder


def _followed(process: subprocess.Popen, folder: Path, callbacks: Callbacks) -> str:
    """Show a run's output and call the callbacks until it ends. Returns its error."""
    from megatron_rft.tracking.progress import StepBar

    bar, steps, error, raised = StepBar(), _Steps(folder, callbacks), "", None
    while True:
        try:
            for line in process.stdout:
                error = line.removeprefix(ERROR) if line.startswith(ERROR) else error + line if error else ""
                if bar.show(line.rstrip("\n")) and steps.report():
                    process.terminate()
            process.wait()
            steps.report()
            break
        except BaseException as reason:  # Ctrl-C, or a callback's own
            process.kill() if raised else process.terminate()
            raised = raised or reason
            if not isinstance(reason, KeyboardInterrupt):
                steps.callbacks = ()
    bar.close()
    if raised:
        raise raised
    return error.strip()


class _Steps:
    """The steps of a run that have not been reported to its callbacks."""

    def __init__(self, folder: Path, callbacks: Callbacks):
        self.folder, self.callbacks, self.since = folder, callbacks, time.time()

    def report(self) -> bool:
        """Whether a callback wants the run to end."""
        from megatron_rft.tracking.metrics import METRICS_FILE, read_metrics

        file, stop = self.folder / METRICS_FILE, False
        for record in read_metrics(file) if self.callbacks and file.is_file() else ():
            if record["time"] > self.since:
                self.since = record["time"]
                metrics = {name: math.nan if value is None else value for name, value in record.items()}
                del metrics["step"], metrics["time"]
                stop |= "True" in [str(callback(record["step"], metrics)) for callback in self.callbacks]  # numpy's too
        return stop
