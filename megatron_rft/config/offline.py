"""The sections of offline training: `generation` of trajectories, and `algorithm` of trainer offline.

Names and defaults are those of megatron_rft.objectives.offline, which says what they compute.
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from megatron_rft.config.messages import at
from megatron_rft.config.sections import Count, Natural, NonNegative, Positive, Section

UNUSED_IN_TRAINING = (
    "data.validation",
    "rollout.prompts_per_step",
    "rollout.group_size",
    "rollout.temperature",
    "pipo",
    "constraint",
    "critic",
    "generation",
    "tracking.sampled_steps",
)
UNUSED_IN_GENERATION = (
    "run.steps",
    "run.epochs",
    "model.initialise",
    "model.reference",
    "megatron",
    "algorithm",
    "optimizer",
    "batching",
    "data.validation",
    "data.test",
    "data.shuffle",
    "rollout.prompts_per_step",
    "pipo",
    "constraint",
    "critic",
    "evaluation",
    "checkpoint",
    "tracking",
    "faults",
)


class Generation(Section):
    """The trajectory store that trainer generate writes into run.output_dir."""

    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Share of the kept problems that is set apart for validation."""
    problems_per_shard: Count = 64
    """Problems that are sampled together and written into one file: the unit of work, and of what a kill can cost."""


class Offline(Section):
    """What every offline algorithm has."""

    batch_sequences: Count = 64
    """Trajectories per optimizer step; a pair is two of them."""
    part_norms_every: Natural = 0
    """Steps between measurements of the gradient's norm of right and of wrong trajectories apart: two passes more.
    0: never."""


class Pairwise(Offline):
    pairing: Literal["cover", "one", "all"] = "cover"
    """cover: each trajectory of a problem is in one pair at least. one: a pair per problem. all: each right with each
    wrong one."""

    @model_validator(mode="after")
    def _check_even(self):
        if self.batch_sequences % 2:
            raise at("batch_sequences", f"{self.batch_sequences} trajectories are no whole number of pairs")
        return self


class RFT(Offline):
    name: Literal["rft"] = "rft"


class DPO(Pairwise):
    name: Literal["dpo"] = "dpo"
    beta: Positive = 0.1
    """Strength of the KL to the reference that the method implies."""


class RPO(DPO):
    name: Literal["rpo"] = "rpo"
    alpha: NonNegative = 1.0
    """Of the likelihood of the right one."""


class IPO(Pairwise):
    name: Literal["ipo"] = "ipo"
    beta: Positive = 0.1
    """The margin of log-ratios is pulled to 1 / (2 beta)."""
    length_normalised: bool = True
    """Log-ratios per token in the mean; false: their sums, as in the paper."""


class SimPO(Pairwise):
    name: Literal["simpo"] = "simpo"
    beta: Positive = 2.0
    gamma: NonNegative = 1.0
    """The margin."""


class SimPER(Pairwise):
    name: Literal["simper"] = "simper"


class KTO(Offline):
    name: Literal["kto"] = "kto"
    beta: Positive = 0.1
    weight_correct: NonNegative = 1.0
    weight_incorrect: NonNegative = 1.0


class AStarPO(Offline):
    name: Literal["a_star_po"] = "a_star_po"
    beta1: Positive = 0.5
    """Temperature of the optimal value's estimate."""
    beta2: Positive = 1e-3
    """Of the log-ratio."""


class OffRL(Offline):
    name: Literal["off_rl"] = "off_rl"
    kl_coefficient: NonNegative = 0.0
    """Of the forward KL(reference || policy), exact over the vocabulary. fpa.txt B.6 takes 0.04."""
    reference: Literal["recompute", "cached_hidden"] = "recompute"
    """Where the reference's distribution comes from: a forward pass in each step, or hidden states kept on disk."""
    reference_cache: str | None = None
    """Folder of those hidden states, made when it is not there. None: the run's own."""

    @property
    def compares(self) -> bool:
        """Whether each step looks at the reference's whole distribution."""
        return self.kl_coefficient > 0

    @model_validator(mode="after")
    def _check_reference(self):
        if self.differs("reference") and not self.compares:
            raise at("reference", f"does nothing: {self.name} asks for no distribution while kl_coefficient is 0")
        if self.reference_cache and self.reference != "cached_hidden":
            raise at("reference_cache", "does nothing unless reference is cached_hidden")
        return self


class FPA(OffRL):
    name: Literal["fpa"] = "fpa"
    extrapolation: NonNegative = 1.0
    """lambda: how far ahead the policy is predicted, beyond where it is from the reference. 0 is Off-RL."""
    fpa_on: Literal["both", "correct", "incorrect"] = "both"
    """Trajectories that are weighted by the predicted policy; the others by the present one."""

    @property
    def compares(self) -> bool:
        return True


Algorithm = RFT | DPO | RPO | IPO | SimPO | SimPER | KTO | AStarPO | OffRL | FPA
