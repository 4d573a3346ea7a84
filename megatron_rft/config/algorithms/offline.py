"""The sections of the algorithms that learn from given data, and their table. No torch.

SFT learns from answers; the others, whose mathematics is in `objectives/offline`, from a store of trajectories.
"""

from typing import ClassVar, Literal

from megatron_rft.config.algorithms.base import Algorithm, Trainer
from megatron_rft.config.messages import at
from megatron_rft.config.plugins import Teaching
from megatron_rft.config.sections import Count, Natural, NonNegative, Positive


class SFT(Algorithm, name="sft"):
    """Supervised fine-tuning."""

    trainer: ClassVar[Trainer] = "sft"

    batch_sequences: Count = 64
    """Sequences per optimizer step."""


class Offline(Algorithm):
    """The base class of offline methods."""

    trainer: ClassVar[Trainer] = "offline"
    uses_reference: ClassVar[bool] = True  # every method logs log-ratios to the reference

    batch_sequences: Count = 64
    """Trajectories per optimizer step; a pair has two."""
    part_norms_every: Natural = 0
    """Steps between separate measurements of the gradient norms of right and of wrong trajectories, which take two more
    passes. 0: never."""


class Pairwise(Offline):
    pairs: ClassVar[bool] = True

    pairing: Literal["cover", "one", "all"] = "cover"
    """cover: each trajectory of a problem is in at least one pair. one: one pair per problem. all: each right
    trajectory with each wrong one."""

    def _check(self):
        if self.batch_sequences % 2:
            raise at("batch_sequences", f"{self.batch_sequences} must be even: a pair has two trajectories")


class RFT(Offline, name="rft"):
    """Rejection fine-tuning: supervised fine-tuning on the right trajectories."""


class DPO(Pairwise, name="dpo"):
    """The margin between the log-ratios of a right and a wrong trajectory."""

    beta: Positive = 0.1
    """Strength of the method's implicit KL to the reference."""


class RPO(DPO, name="rpo"):
    """DPO plus the likelihood of the right trajectory."""

    alpha: NonNegative = 1.0
    """Factor of the right trajectory's likelihood."""


class IPO(Pairwise, name="ipo"):
    """Regression of the margin between log-ratios to a finite value."""

    beta: Positive = 0.1
    """The target of the margin is 1 / (2 beta)."""
    length_normalised: bool = True
    """true: mean log-ratio per token. false: the sum over tokens, as in the paper."""


class SimPO(Pairwise, name="simpo"):
    """A margin of length-normalised likelihoods."""

    beta: Positive = 2.0
    gamma: NonNegative = 1.0
    """The margin."""


class SimPER(Pairwise, name="simper"):
    """Compares the inverse perplexities of both sides."""


class KTO(Offline, name="kto"):
    """Compares each trajectory with the mean log-ratio."""

    beta: Positive = 0.1
    weight_correct: NonNegative = 1.0
    weight_incorrect: NonNegative = 1.0


class AStarPO(Offline, name="a_star_po"):
    """Regression of the log-ratio on the advantage."""

    beta1: Positive = 0.5
    """Temperature of the optimal value's estimate."""
    beta2: Positive = 1e-3
    """Factor of the log-ratio."""


class OffRL(Offline, name="off_rl"):
    """REINFORCE on each trajectory's length-normalised probability."""

    kl_coefficient: NonNegative = 0.0
    """Factor of the forward KL(reference || policy), exact over the vocabulary. fpa.txt B.6 uses 0.04."""
    kl_aggregation: Literal["sequence_sum", "token_mean"] = "sequence_sum"
    """sequence_sum: sum over each trajectory, then mean over trajectories, as in fpa.txt Eq. 31. token_mean: mean over
    all tokens."""
    reference: Literal["recompute", "cached_hidden"] = "recompute"
    """The source of the reference's distribution. recompute: a forward pass in each step. cached_hidden: hidden states
    in the run's folder, computed once."""

    @property
    def compares_distributions(self) -> bool:
        return self.kl_coefficient > 0

    def _check(self):
        self.unused(not self.kl_coefficient, "while kl_coefficient is 0", "kl_aggregation")
        alone = not self.compares_distributions
        self.unused(alone, f"while kl_coefficient is 0: {self.name} needs no distribution then", "reference")


class FPA(OffRL, name="fpa"):
    """Off-RL weighted by an extrapolation of the policy."""

    compares_distributions: ClassVar[bool] = True

    extrapolation: NonNegative = 1.0
    """lambda: how far the policy is extrapolated away from the reference. 0 is Off-RL."""
    fpa_on: Literal["both", "correct", "incorrect"] = "both"
    """Trajectories weighted by the extrapolated policy; the others are weighted by the current one."""

    def _check(self):
        self.unused(not self.extrapolation, "while extrapolation is 0: both are weighted alike", "fpa_on")


class OfflineDistillation(Teaching, Offline, name="offline_distil"):
    """Distillation from a teacher on all trajectories, right or wrong."""

    compares_distributions: ClassVar[bool] = True


OFFLINE: dict[str, tuple[type[Algorithm], str]] = {
    # algorithm.name: (section, MODULE.CLASS of its objective under objectives/)
    "sft": (SFT, "sft.SFT"),
    "rft": (RFT, "sft.RFT"),
    "dpo": (DPO, "offline.pairs.DPO"),
    "rpo": (RPO, "offline.pairs.RPO"),
    "ipo": (IPO, "offline.pairs.IPO"),
    "simpo": (SimPO, "offline.pairs.SimPO"),
    "simper": (SimPER, "offline.pairs.SimPER"),
    "kto": (KTO, "offline.kto.KTO"),
    "a_star_po": (AStarPO, "offline.a_star_po.AStarPO"),
    "off_rl": (OffRL, "offline.fpa.OffRL"),
    "fpa": (FPA, "offline.fpa.FPA"),
    "offline_distil": (OfflineDistillation, "distil.OfflineDistil"),
}
