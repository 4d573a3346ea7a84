"""The base classes of the offline methods' sections."""

from typing import ClassVar, Literal

from pydantic import model_validator

from megatron_rft.config.algorithms.base import Algorithm, Trainer
from megatron_rft.config.messages import at
from megatron_rft.config.sections import Count, Natural


class Offline(Algorithm):
    """The base class of offline methods."""

    trainer: ClassVar[Trainer] = "offline"

    batch_sequences: Count = 64
    """Trajectories per optimizer step; a pair has two."""
    part_norms_every: Natural = 0
    """Steps between separate measurements of the gradient norms of right and of wrong trajectories, which take two more
    passes. 0: never."""

    @property
    def uses_reference(self) -> bool:
        return True  # every method logs log-ratios to the reference

    @property
    def compares_distributions(self) -> bool:
        """Whether each step needs the reference's full distribution."""
        return False


class Pairwise(Offline):
    pairs: ClassVar[bool] = True

    pairing: Literal["cover", "one", "all"] = "cover"
    """cover: each trajectory of a problem is in at least one pair. one: one pair per problem. all: each right
    trajectory with each wrong one."""

    @model_validator(mode="after")
    def _check_even(self):
        if self.batch_sequences % 2:
            raise at("batch_sequences", f"{self.batch_sequences} must be even: a pair has two trajectories")
        return self
