"""An algorithm of the user's."""

from typing import ClassVar, Literal

from pydantic import ConfigDict

from megatron_rft.config.algorithms.base import Online


class Own(Online):
    """docs/own_algorithm.md. Other options than these are those of the class's own section."""

    model_config = ConfigDict(extra="allow")
    of_user: ClassVar[bool] = True

    name: Literal["own"] = "own"
    objective: str
    """The class: my_file.py:Name, its path relative to the working directory, or my_module:Name."""

    @property
    def uses_reference(self) -> bool:
        return True  # it may: only its class knows (training/user_algorithm.py)

    @property
    def corrects_sampling(self) -> bool:
        return self.model_extra.get("importance", "none") != "none" or super().corrects_sampling
