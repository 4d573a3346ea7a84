"""A destination of metrics besides the metrics file: Weights & Biases."""

import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

from megatron_rft.utils.errors import UserError
from megatron_rft.utils.files import write_atomically
from megatron_rft.utils.processes import start_helper, without_stop_signals

INIT_TIMEOUT = 30.0  # seconds; wandb's default of 90 would keep a cluster waiting
FINISH_TIMEOUT = 60.0  # seconds; wandb has none, but a stopping job has only minutes. Unsent data stays on the disk
FIX = "Run `wandb login`, set WANDB_API_KEY, or set tracking.wandb.mode=offline"
LOG_IN = "import sys, wandb; sys.exit(0 if wandb.login(prompt=False, verify=False) else 3)"


def check_key() -> None:
    """Refuse to start where `wandb.init` would find no key. A terminal passes, where it asks for one, and whatever else
    fails here. In a process, because wandb starts threads; silent, because it would ask the network for a greeting."""
    silent = os.environ | {"WANDB_MODE": "online", "WANDB_SILENT": "true"}
    asked = start_helper([sys.executable, "-c", LOG_IN], env=silent, stdout=DEVNULL, stderr=DEVNULL)
    if asked.wait() == 3 and not os.isatty(0):
        raise UserError(f"tracking.wandb: wandb has no key here. {FIX}")


class WandbLogger:
    """Logs to Weights & Biases if tracking.wandb is set. Each output folder is one run there: a resume continues it.

    Steps that run again after a kill are logged again; the curves are drawn over `step`, where both points coincide.
    Without a network, each start is logged offline to a folder under RUN/wandb; `wandb sync` joins them to one run.

    `settings`: arguments of `wandb.init` (project, name, mode, entity). `resolved`: the recipe, shown with the run.
    """

    def __init__(self, output_dir: Path, settings: Mapping[str, Any], resolved: Mapping[str, Any] | None = None):
        import wandb  # the plan says if it is missing

        id_file = Path(output_dir) / "wandb_id"
        known_id = id_file.read_text().strip() if id_file.exists() else None
        arguments = {"dir": str(output_dir), "id": known_id, "config": dict(resolved or {})} | dict(settings)
        limits = wandb.Settings(init_timeout=INIT_TIMEOUT, finish_timeout=FINISH_TIMEOUT, silent=True)
        start = without_stop_signals()(partial(wandb.init, resume="allow", settings=limits))  # it starts a process
        problem = None
        try:
            self._run = start(**arguments)
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
            raise UserError(f"wandb refused to start: {error}. {FIX}") from error
        except wandb.errors.CommError as error:
            problem = str(error).splitlines()[0]
            wandb.teardown()  # it still holds the run's id
            self._run = start(**arguments | {"mode": "offline"})
        if self._run.offline:
            why = f"wandb cannot be reached ({problem}): logging offline" if problem else "wandb logs offline"
            print(f"{why}; send it later: wandb sync {self._run.settings.sync_dir}", flush=True)
        elif url := self._run.url:
            print(f"wandb: {url}", flush=True)
        write_atomically(id_file, self._run.id)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step} | dict(metrics))

    def close(self) -> None:
        self._run.finish()
