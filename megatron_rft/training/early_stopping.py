"""Early stopping: the best evaluation so far, how long ago it was, and the model of it."""

from dataclasses import dataclass, replace

import torch

from megatron_rft.objectives.base import State

PREFIX = "selection."


@dataclass(frozen=True)
class Selection:
    """Only evaluations during training count; the model that it started from is no candidate."""

    patience: int | None = None  # evaluations without a new best that end the run; None: none do
    best: float = -1.0
    step: int = 0  # of the best; 0: nothing was evaluated yet
    waited: int = 0

    def judged(self, accuracy: float, step: int) -> "Selection":
        """After an evaluation. An equal accuracy is no new best."""
        if accuracy > self.best:
            return replace(self, best=accuracy, step=step, waited=0)
        return replace(self, waited=self.waited + 1)

    @property
    def exhausted(self) -> bool:
        return self.patience is not None and self.waited >= self.patience

    def into(self, state: State) -> State:
        """The state with this in it, for a checkpoint."""
        own = {"best": self.best, "step": self.step, "waited": self.waited}
        return state | {PREFIX + name: torch.tensor(value, dtype=torch.float64) for name, value in own.items()}

    def out_of(self, state: State) -> tuple["Selection", State]:
        """What a checkpoint has of it, and the rest of the state."""
        rest = {name: value for name, value in state.items() if not name.startswith(PREFIX)}
        if PREFIX + "best" not in state:
            return self, rest
        best, step, waited = (state[PREFIX + name].item() for name in ("best", "step", "waited"))
        return replace(self, best=best, step=int(step), waited=int(waited)), rest
