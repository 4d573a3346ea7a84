"""Off-RL: REINFORCE on each trajectory's length-normalised probability."""

from typing import Literal

from pydantic import model_validator

from megatron_rft.config.algorithms.offline.base import Offline
from megatron_rft.config.messages import at
from megatron_rft.config.sections import NonNegative


class OffRL(Offline):
    name: Literal["off_rl"] = "off_rl"
    kl_coefficient: NonNegative = 0.0
    """Factor of the forward KL(reference || policy), exact over the vocabulary. fpa.txt B.6 uses 0.04."""
    kl_aggregation: Literal["sequence_sum", "token_mean"] = "sequence_sum"
    """sequence_sum: sum over each trajectory, then mean over trajectories, as in fpa.txt Eq. 31. token_mean: mean over
    all tokens."""
    reference: Literal["recompute", "cached_hidden"] = "recompute"
    """The source of the reference's distribution. recompute: a forward pass in each step. cached_hidden: hidden states
    on disk."""
    reference_cache: str | None = None
    """Folder of those hidden states; it is created if missing. None: a folder of the run."""

    @property
    def compares_distributions(self) -> bool:
        return self.kl_coefficient > 0

    @model_validator(mode="after")
    def _check_reference(self):
        if self.differs("kl_aggregation") and not self.kl_coefficient:
            raise at("kl_aggregation", "does nothing while kl_coefficient is 0")
        if self.differs("reference") and not self.compares_distributions:
            raise at("reference", f"does nothing: {self.name} needs no distribution while kl_coefficient is 0")
        if self.reference_cache and self.reference != "cached_hidden":
            raise at("reference_cache", "does nothing unless reference is cached_hidden")
        return self
