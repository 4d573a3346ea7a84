"""Sends a step's metrics to the file, the display and wandb, on the main rank only."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_rft.config.sections import Tracking
from megatron_rft.tracking.loggers import WandbLogger
from megatron_rft.tracking.metrics import (
    EXPERTS_FILE,
    METRICS_FILE,
    NOTES_FILE,
    SAMPLES_FILE,
    Sample,
    StepFile,
    add_note,
    due,
    shortened,
)
from megatron_rft.tracking.progress import Progress, make_progress


class Tracker:
    """Sends metrics to the metrics file, the display and wandb if it is on; does nothing on ranks other than the main.

    `resume_step`: the first step that this process will run. A step is logged once, with all of its metrics: an
    evaluation after step 20 goes into the call for step 20. `name`: of the run; None takes the folder's name.
    """

    def __init__(
        self,
        output_dir: Path,
        config: Tracking,
        total_steps: int,
        resume_step: int = 0,
        is_main: bool = True,
        name: str | None = None,
        resolved: Mapping[str, Any] | None = None,
    ):
        self._files: dict[str, StepFile] = {}  # none on other ranks, and after the end
        self._progress, self._wandb = Progress(), None
        self._sampled_steps, self._total_steps = config.sampled_steps, total_steps
        if not is_main:
            return
        self._folder = output_dir = Path(output_dir)
        if config.wandb is not None:
            given = {key: value for key, value in config.wandb.model_dump().items() if value is not None}
            self._wandb = WandbLogger(output_dir, {"name": name or output_dir.resolve().name} | given, resolved)
        self._files = {file: StepFile(output_dir / file, resume_step) for file in (METRICS_FILE, SAMPLES_FILE)}
        self._progress = make_progress(config.progress, total_steps)
        if lost := set(range(1, resume_step)) - self._files[METRICS_FILE].steps:
            what = f"has no lines of {len(lost)} steps, of which step {min(lost)} is the first"
            self.note(f"{METRICS_FILE} {what}: something else has changed the file")

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        if not self._files:
            return
        numbers = {name: float(value) for name, value in metrics.items()}
        self._files[METRICS_FILE].write(step, numbers)
        self._show(lambda wandb: wandb.log(step, numbers))
        self._progress.log(step, numbers)

    def _show(self, act: Callable[[WandbLogger], None]) -> None:
        """Leave wandb out once it fails, for example because a signal has ended its service: training goes on."""
        try:
            if self._wandb:
                act(self._wandb)
        except Exception as error:
            self._wandb, why = None, f"{type(error).__name__}: {error}"
            self.note(f"Wandb gets no more steps of this run, because it failed ({why}): {METRICS_FILE} has all")

    def experts(self, step: int, loads: Mapping[int, list[int]]) -> None:
        """Write the tokens of each expert by layer; call this before `log` of that step."""
        if not self._files:
            return
        if EXPERTS_FILE not in self._files:
            self._files[EXPERTS_FILE] = StepFile(self._folder / EXPERTS_FILE, step)
        self._files[EXPERTS_FILE].write(step, {"layers": loads})

    def samples_due(self, step: int) -> bool:
        """Whether samples of the step are written; the same on all ranks."""
        return due(step, self._total_steps, self._sampled_steps)

    def samples(self, step: int, make: Callable[[], list[Sample]]) -> None:
        """Write samples of the step if they are due; call this before `log` of that step."""
        if self._files and self.samples_due(step):
            self._files[SAMPLES_FILE].write(step, {"samples": [shortened(sample) for sample in make()]})

    def note(self, text: str, alarm: bool = False) -> None:
        if self._files:
            self._progress.note(text)
            add_note(self._folder / NOTES_FILE, text, alarm)

    def sync(self) -> None:
        """Flush the files to the disk. Call this before a checkpoint is marked complete."""
        for file in self._files.values():
            file.sync()

    def close(self) -> None:
        """May be called twice."""
        self._show(lambda wandb: wandb.close())
        for part in (self._progress, *self._files.values()):
            part.close()
        self._files, self._progress, self._wandb = {}, Progress(), None
