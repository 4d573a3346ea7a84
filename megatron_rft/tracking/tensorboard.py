"""Writes TensorBoard event files under RUN/tensorboard if tracking.tensorboard is set."""

from collections.abc import Mapping
from pathlib import Path

from megatron_rft.utils.errors import UserError


class TensorBoardLogger:
    """On a resume, TensorBoard removes the points from `resume_step` on."""

    def __init__(self, output_dir: Path, resume_step: int = 0):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError(
                "tracking.tensorboard is set, but tensorboard is not installed: "
                "pip install 'megatron-rft[tensorboard]', or set tracking.tensorboard=false"
            ) from None
        self._writer = SummaryWriter(str(Path(output_dir) / "tensorboard"), purge_step=resume_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()
