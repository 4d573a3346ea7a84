"""A user's algorithm."""

from typing import ClassVar, Literal

from pydantic import ConfigDict

from megatron_rft.config.algorithms.base import Online


class Own(Online):
    """docs/own_algorithm.md. Further options belong to the section of the user's class."""

    model_config = ConfigDict(extra="allow")
    of_user: ClassVar[bool] = True

    name: Literal["own"] = "own"
    objective: str
    """The class: my_file.py:Name (relative to the working directory) or my_module:Name."""

    @property
    def uses_reference(self) -> bool:
        return True  # it may use one: training/user_algorithm.py checks it when the class is loaded

    @property
    def corrects_sampling(self) -> bool:
        return self.model_extra.get("importance", "none") != "none" or super().corrects_sampling
