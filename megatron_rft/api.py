"""The package from Python: what the commands do, as functions for notebooks, sweeps and services. No torch at import.

A run is a process of its own, so that a notebook keeps its memory and its signals. Its steps come back through
RUN/metrics.jsonl, its output through a pipe.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from megatron_rft.config import Recipe, load
from megatron_rft.responses import Prompt, Score
from megatron_rft.utils.end_with_parent import die_with
from megatron_rft.utils.errors import FINISHED, STOPPED, USER_ERROR, RunFailed, UserError

if TYPE_CHECKING:
    from megatron_rft.conversion.convert import Conversion
    from megatron_rft.evaluation.evaluate import EvalResult
    from megatron_rft.report.runs import RecordedRun

AnyRecipe = Recipe | str | Path | Mapping[str, Any]
Callback = Callable[[int, dict[str, float]], object]
ERROR = "error: "
PROBE = {"run": {"output_dir": "-", "steps": 1}, "model": {"path": "-"}, "data": {"train": "-"}}


def train(
    recipe: AnyRecipe, nproc: int | None = None, callbacks: Sequence[Callback] = (), **sections: Any
) -> "RecordedRun":
    """Train a recipe, or resume its run, until its last step. Ctrl-C ends it after a checkpoint; a second one kills it.

    Args:
        recipe: as for `load`.
        **sections: as for `load`.
        nproc: ranks on this machine. None: one, without a launcher.
        callbacks: each is called with the step, from 0 (the first evaluation) on, and its metrics by name
            (docs/metrics.md), in this process. The run ends after a checkpoint if one returns True.

    Returns:
        The run's metrics, samples and alarms, as `runs.read(folder)` does.

    Raises:
        ConfigError, DataError: what `megatron-rft train` refuses with status 2.
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
    recipe: AnyRecipe,
    model: str | Path | None = None,
    like: str | Path | None = None,
    out: str | Path | None = None,
    **sections: Any,
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
        ConfigError: an option of the reward is wrong.
        UserError: there are not as many rows as responses.
    """
    from megatron_rft.rewards import registry

    if len(rows) != len(responses):
        raise UserError(f"{len(rows)} rows, but {len(responses)} responses: each row has one response")
    section = {"kind": "own", "function": reward} if callable(reward) else reward
    grader = registry.build(load(PROBE, reward=section).reward)
    texts = [str(row.get("question", "")) for row in rows]
    answers = [str(row.get("answer", "")) for row in rows]
    prompts = [
        Prompt(number, (), text, answer, dict(row), question=text)
        for number, (row, text, answer) in enumerate(zip(rows, texts, answers, strict=True))
    ]
    try:
        return grader(prompts, list(responses))
    finally:
        grader.close()


def convert(
    source: str | Path, out: str | Path, to: str | None = None, like: str | Path | None = None
) -> "Conversion | None":
    """Convert a checkpoint, compare the copy with it bit by bit, and only then give it its name.

    Args:
        source: a Hugging Face folder or hub name, a torch_dist checkpoint, a run, or a folder of adapters.
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

    return command.convert(str(source), Path(out), to, None if like is None else str(like))


# ---- a run in another process


def _run(command: str, recipe: Recipe, nproc: int | None, callbacks: Sequence[Callback] = ()) -> Path:
    """Run a recipe in a process, and return its folder. Checks it here first, so that what is wrong is raised here."""
    from megatron_rft.commands import train
    from megatron_rft.plan import check

    train.check_command(recipe.trainer, command)
    check(recipe, nproc or 1, starts=True)
    folder = Path(recipe.run.output_dir)
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", prefix="megatron-rft-") as file:
        yaml.safe_dump(recipe.model_dump(exclude_unset=True), file, sort_keys=False)
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


def _followed(process: subprocess.Popen, folder: Path, callbacks: Sequence[Callback]) -> str:
    """Show a run's output and call the callbacks until it ends. Returns its error."""
    from megatron_rft.tracking.progress import StepBar

    bar, steps, error, interrupted = StepBar(), _Steps(folder, callbacks), "", False
    while True:
        try:
            for line in process.stdout:
                error = line.removeprefix(ERROR) if line.startswith(ERROR) else error + line if error else ""
                if bar.show(line.rstrip("\n")) and steps.report():
                    process.terminate()
            process.wait()
            steps.report()
            break
        except KeyboardInterrupt:
            process.kill() if interrupted else process.terminate()
            interrupted = True
    bar.close()
    if interrupted:
        raise KeyboardInterrupt
    return error.strip()


class _Steps:
    """The steps of a run that have not been reported to its callbacks."""

    def __init__(self, folder: Path, callbacks: Sequence[Callback]):
        self.folder, self.callbacks, self.since = folder, callbacks, time.time()

    def report(self) -> bool:
        """Whether a callback wants the run to end."""
        from megatron_rft.tracking.metrics import METRICS_FILE, read_metrics

        file, stop = self.folder / METRICS_FILE, False
        for record in read_metrics(file) if self.callbacks and file.is_file() else ():
            if record["time"] > self.since:
                self.since = record["time"]
                metrics = {name: value for name, value in record.items() if name not in ("step", "time")}
                stop |= any([callback(record["step"], metrics) is True for callback in self.callbacks])
        return stop
