"""What offline methods share."""

from typing import ClassVar, Literal

from pydantic import model_validator

from megatron_rft.config.algorithms.base import Algorithm, Trainer
from megatron_rft.config.messages import at
from megatron_rft.config.sections import Count, Natural


class Offline(Algorithm):
    """What every offline algorithm has."""

    trainer: ClassVar[Trainer] = "offline"

    batch_sequences: Count = 64
    """Trajectories per optimizer step; a pair is two of them."""
    part_norms_every: Natural = 0
    """Steps between measurements of the gradient's norm of right and of wrong trajectories apart: two passes more.
    0: never."""

    @property
    def uses_reference(self) -> bool:
        return True  # for what every method logs, if not for its loss

    @property
    def compares_distributions(self) -> bool:
        """Whether each step looks at the reference's whole distribution."""
        return False


class Pairwise(Offline):
    pairs: ClassVar[bool] = True

    pairing: Literal["cover", "one", "all"] = "cover"
    """cover: each trajectory of a problem is in one pair at least. one: a pair per problem. all: each right with each
    wrong one."""

    @model_validator(mode="after")
    def _check_even(self):
        if self.batch_sequences % 2:
            raise at("batch_sequences", f"{self.batch_sequences} trajectories are no whole number of pairs")
        return self
