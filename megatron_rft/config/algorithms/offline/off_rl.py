"""Off-RL: each trajectory's length-normalised probability."""

from typing import Literal

from pydantic import model_validator

from megatron_rft.config.algorithms.offline.base import Offline
from megatron_rft.config.messages import at
from megatron_rft.config.sections import NonNegative


class OffRL(Offline):
    name: Literal["off_rl"] = "off_rl"
    kl_coefficient: NonNegative = 0.0
    """Of the forward KL(reference || policy), exact over the vocabulary. fpa.txt B.6 takes 0.04."""
    kl_aggregation: Literal["sequence_sum", "token_mean"] = "sequence_sum"
    """sequence_sum: the KL is added up over each trajectory, as in fpa.txt Eq. 31, and averaged over them. token_mean:
    its mean over all tokens."""
    reference: Literal["recompute", "cached_hidden"] = "recompute"
    """Where the reference's distribution comes from: a forward pass in each step, or hidden states kept on disk."""
    reference_cache: str | None = None
    """Folder of those hidden states, made when it is not there. None: the run's own."""

    @property
    def compares_distributions(self) -> bool:
        return self.kl_coefficient > 0

    @model_validator(mode="after")
    def _check_reference(self):
        if self.differs("kl_aggregation") and not self.kl_coefficient:
            raise at("kl_aggregation", "does nothing while kl_coefficient is 0")
        if self.differs("reference") and not self.compares_distributions:
            raise at("reference", f"does nothing: {self.name} asks for no distribution while kl_coefficient is 0")
        if self.reference_cache and self.reference != "cached_hidden":
            raise at("reference_cache", "does nothing unless reference is cached_hidden")
        return self
