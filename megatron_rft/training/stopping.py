"""Ends a run before its last step: on a signal, or after non-finite steps."""

import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from megatron_rft.records import Batch
from megatron_rft.utils.errors import RunFailed


class StopSignal:
    """SIGTERM, SIGUSR1 (a time limit, a preemption) and Ctrl-C request an orderly end after the current step."""

    def __init__(self) -> None:
        self.received = 0
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, _frame: Any) -> None:
        if self.received == number == signal.SIGINT:
            raise KeyboardInterrupt  # a second Ctrl-C stops at once
        self.received = number

    def agreed(self) -> int:
        """The signal's number if any rank got one, else 0. Collective."""
        heard = torch.tensor([self.received], dtype=torch.int32)
        if dist.get_backend() == "nccl":
            heard = heard.cuda()
        dist.all_reduce(heard, dist.ReduceOp.MAX)
        return int(heard)


class NonFiniteGuard:
    """Allows `bound` skipped optimizer steps in a row. One more writes the batch to disk and ends the run."""

    def __init__(self, output_dir: Path, bound: int):
        self.output_dir, self.bound, self.in_a_row, self.total = output_dir, bound, 0, 0

    def note(self, metrics: dict[str, float], batch: Batch, step: int) -> None:
        if not metrics["skipped"]:
            self.in_a_row = 0
            return
        self.in_a_row, self.total = self.in_a_row + 1, self.total + 1
        if self.in_a_row <= self.bound:
            return
        path = self.output_dir / f"failed_batch_step_{step:06d}.safetensors"
        if dist.get_rank() == 0:
            save_file(batch.state_dict(), path)
        raise RunFailed(
            f"step {step}: loss {metrics['loss']}, gradient norm {metrics['grad_norm']}: not finite {self.in_a_row} "
            f"times in a row, more than faults.max_skipped_steps = {self.bound}. The batch is in {path}; the newest "
            "checkpoint is from before these steps. A lower optimizer.lr, or fp32, usually helps"
        )
