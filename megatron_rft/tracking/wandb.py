"""Weights & Biases, when asked for. One run there per output folder: a resumed job goes on in the run it began.

Steps done again after a kill are logged again; the curves are drawn over `step`, where both points coincide.
A first start without network is refused; one that goes on with a run keeps what it logs for later.
Offline, each start leaves a folder under RUN/wandb; `wandb sync --append` joins them.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from megatron_rft.errors import UserError

INIT_TIMEOUT = 30.0  # seconds; wandb's own would let a cluster wait for 90


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
        arguments = {"dir": str(output_dir), "id": known_id, "config": dict(recipe or {})} | dict(settings)
        start = partial(wandb.init, resume="allow", settings=wandb.Settings(init_timeout=INIT_TIMEOUT))
        try:
            self._run = start(**arguments)
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
            raise UserError(
                f"wandb refused to start: {error}. Run `wandb login`, or set tracking.wandb.mode=offline"
            ) from error
        except wandb.errors.CommError as error:
            if known_id is None:
                raise UserError(
                    f"wandb cannot be reached: {str(error).splitlines()[0]}. Set tracking.wandb.mode=offline, and send "
                    f"the run later with `wandb sync`"
                ) from error
            wandb.teardown()  # it still holds the run's id
            self._run = start(**arguments | {"mode": "offline"})
            print("wandb cannot be reached: this part of the run is kept for `wandb sync --append`", flush=True)
        id_file.write_text(self._run.id)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step} | dict(metrics))

    def close(self) -> None:
        self._run.finish()
