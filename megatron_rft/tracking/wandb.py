"""Logs to Weights & Biases if tracking.wandb is set. Each output folder is one run there: a resume continues it.

Steps that run again after a kill are logged again; the curves are drawn over `step`, where both points coincide.
Without a network, each start is logged offline to a folder under RUN/wandb; `wandb sync` joins them to one run.
"""

import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from megatron_rft.utils.errors import UserError
from megatron_rft.utils.files import write_atomically

PROBE_TIMEOUT = 5.0  # seconds
INIT_TIMEOUT = 30.0  # seconds; wandb's default of 90 would keep a cluster waiting
FINISH_TIMEOUT = 60.0  # seconds; wandb has none, but a stopping job has only minutes. Unsent data stays on the disk


class WandbLogger:
    """`settings`: arguments of `wandb.init` (project, name, mode, entity). `resolved`: the recipe, shown with the
    run."""

    def __init__(self, output_dir: Path, settings: Mapping[str, Any], resolved: Mapping[str, Any] | None = None):
        try:
            import wandb
        except ImportError:
            raise UserError(
                "tracking.wandb is set, but wandb is not installed: "
                "pip install 'megatron-rft[wandb]', or set tracking.wandb=null"
            ) from None
        id_file = Path(output_dir) / "wandb_id"
        known_id = id_file.read_text().strip() if id_file.exists() else None
        arguments = {"dir": str(output_dir), "id": known_id, "config": dict(resolved or {})} | dict(settings)
        limits = wandb.Settings(init_timeout=INIT_TIMEOUT, finish_timeout=FINISH_TIMEOUT)
        start = partial(wandb.init, resume="allow", settings=limits)
        problem = None if settings.get("mode") == "offline" else unreachable(wandb.setup().settings.base_url)
        try:
            self._run = start(**arguments | ({"mode": "offline"} if problem else {}))
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
            raise UserError(
                f"wandb refused to start: {error}. Run `wandb login`, or set tracking.wandb.mode=offline"
            ) from error
        except wandb.errors.CommError as error:
            problem = str(error).splitlines()[0]
            wandb.teardown()  # it still holds the run's id
            self._run = start(**arguments | {"mode": "offline"})
        if problem:
            later = f"wandb sync {self._run.settings.sync_dir}"
            print(f"wandb cannot be reached ({problem}): logging offline; send it later: {later}", flush=True)
        write_atomically(id_file, self._run.id)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step} | dict(metrics))

    def close(self) -> None:
        self._run.finish()


def unreachable(url: str) -> str | None:
    """Return why the server cannot be reached, or None. wandb itself would try until its timeout."""
    try:
        urllib.request.urlopen(url, timeout=PROBE_TIMEOUT).close()
    except urllib.error.HTTPError:
        return None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        return None if isinstance(reason, ssl.SSLError) else f"{url}: {reason}"  # wandb brings its own certificates
    return None
