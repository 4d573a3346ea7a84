"""Weights & Biases, when asked for. One run there per output folder: a resumed job goes on in the run it began.

Steps done again after a kill are logged again; the curves are drawn over `step`, where both points coincide.
Offline, each start leaves a folder under RUN/wandb; `wandb sync --append` joins them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_rft.errors import UserError


class WandbLogger:
    """`settings` are arguments of `wandb.init` (project, name, mode, entity); `recipe` is shown beside the run."""

    def __init__(self, output_dir: Path, settings: Mapping[str, Any], recipe: Mapping[str, Any] | None = None):
        try:
            import wandb
        except ImportError:
            raise UserError(
                "tracking.wandb is set, but wandb is not installed: "
                "pip install 'megatron-rft[wandb]', or set tracking.wandb=null"
            ) from None
        id_file = Path(output_dir) / "wandb_id"
        known_id = id_file.read_text().strip() if id_file.exists() else None
        arguments = {"dir": str(output_dir)} | dict(settings)
        try:
            self._run = wandb.init(**arguments, id=known_id, resume="allow", config=dict(recipe or {}))
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
            raise UserError(
                f"wandb refused to start: {error}. Run `wandb login`, or set tracking.wandb.mode=offline"
            ) from error
        id_file.write_text(self._run.id)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step} | dict(metrics))

    def close(self) -> None:
        self._run.finish()
