"""Early stopping: the best evaluation so far, the number of evaluations since, and its model."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megatron_rft.megatron import weights
from megatron_rft.megatron.actor import Actor
from megatron_rft.objectives.base import State
from megatron_rft.utils.files import read_json

PREFIX = "selection."
EVALUATION = "evaluation.json"  # in the best model's folder


@dataclass(frozen=True)
class Selection:
    """Only evaluations during training count; the initial model is not a candidate."""

    patience: int | None = None  # evaluations without a new best after which the run ends; None: never
    best: float = -1.0
    step: int = 0  # of the best; 0: no evaluation yet
    waited: int = 0

    def judged(self, accuracy: float, step: int) -> "Selection":
        """The selection after an evaluation. An equal accuracy is not a new best."""
        if accuracy > self.best:
            return replace(self, best=accuracy, step=step, waited=0)
        return replace(self, waited=self.waited + 1)

    @property
    def exhausted(self) -> bool:
        return self.patience is not None and self.waited >= self.patience

    def into(self, state: State) -> State:
        """`state` with this selection, for a checkpoint."""
        own = {"best": self.best, "step": self.step, "waited": self.waited}
        return state | {PREFIX + name: torch.tensor(value, dtype=torch.float64) for name, value in own.items()}

    def out_of(self, state: State) -> tuple["Selection", State]:
        """The selection in a checkpoint's state, and the rest of the state."""
        rest = {name: value for name, value in state.items() if not name.startswith(PREFIX)}
        if PREFIX + "best" not in state:
            return self, rest
        best, step, waited = (state[PREFIX + name].item() for name in ("best", "step", "waited"))
        return replace(self, best=best, step=int(step), waited=int(waited)), rest


class BestModel:
    """Keeps the model of the best evaluation in `folder`, in Hugging Face format, with its step and accuracy."""

    def __init__(self, actor: Actor, folder: Path, tokenizer_folder: Path, patience: int | None):
        self.actor, self.folder, self.tokenizer_folder = actor, folder, tokenizer_folder
        self.selection = Selection(patience)

    def judge(self, accuracy: float, step: int) -> None:
        """Saves the actor's current weights if their evaluation is a new best. Collective."""
        self.selection = self.selection.judged(accuracy, step)
        if self.selection.step == step:
            beside = {EVALUATION: json.dumps({"step": step, "pass@1": accuracy})}
            weights.save_folder(self.actor.stream(), self.folder, self.actor.hf_config, self.tokenizer_folder, beside)

    def load(self) -> tuple[int, float] | None:
        """Loads the best weights into the actor, and returns their step and accuracy; None, without change, if nothing
        was evaluated. After a kill the folder can be of a later step than the checkpoint's selection."""
        if not self.selection.step:
            return None
        self.actor.load(weights.open_folder(self.folder, self.actor.hf_config))
        found = read_json(self.folder / EVALUATION)
        return found["step"], found["pass@1"]
