"""What sees a run and changes no number that is trained on. A run has one list of observers."""

from dataclasses import dataclass

from megatron_rft.records import Batch


@dataclass(frozen=True)
class Trained:
    """An optimizer step. `name`: of its update. `computed`: the sequences of the mini-batch that were computed."""

    number: int  # of the training step
    name: str
    mini_batch: Batch
    computed: Batch
    metrics: dict[str, float]


class Observer:
    def trained(self, step: Trained) -> None:
        """After an optimizer step."""

    def end_of_step(self, step: int, metrics: dict[str, float]) -> str | None:
        """Add metrics of the training step to those that it has. Returns a warning, if any. Collective."""
