"""The base classes of the algorithms' sections: shared options, and capability flags.

Other parts of the package read these flags and properties, never an algorithm's name.
"""

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NamedTuple

from pydantic import Field

from megatron_rft.config.messages import at
from megatron_rft.config.sections import Count, NonNegative, Positive, Section, ShareOrAll

Aggregation = Literal["sequence_mean", "token_mean", "group_mean", "sequence_sum", "constant"]
KLEstimator = Literal["k1", "k2", "k3", "exact"]
KLPlace = Literal["loss", "reward"]
Trainer = Literal["rl", "sft", "offline"]


class Lengths(NamedTuple):
    """Limits of an online run, in tokens."""

    response: int  # rollout.max_response_tokens
    sequence: int  # the longest prompt plus the longest response
    forward_only: int  # of a micro-batch without a backward pass
    positions: int | None  # of the model; None: not known yet


class Algorithm(Section):
    """A section `algorithm`. Each has a field `name`, whose default is its name."""

    if TYPE_CHECKING:
        name: str

    trainer: ClassVar[Trainer]
    of_user: ClassVar[bool] = False  # the user's code has the class
    pairs: ClassVar[bool] = False  # an example is a right and a wrong trajectory of one problem
    compares_distributions: ClassVar[bool] = False  # the loss compares with a second full distribution
    uses_reference: ClassVar[bool] = False  # the loss or the rewards compare the policy with the frozen reference
    teacher_average: ClassVar[float | None] = None  # the rate of the teacher's moving average of the policy's weights


class Online(Algorithm):
    """The base class of online algorithms."""

    trainer: ClassVar[Trainer] = "rl"
    needs_critic: ClassVar[bool] = False
    uses_rewards: ClassVar[bool] = True
    uses_old_logprobs: ClassVar[bool] = True  # in the loss of a batch with several steps
    has_ratio: ClassVar[bool] = True  # the loss has a ratio of new to old probabilities
    uses_feedback: ClassVar[bool] = False  # a teacher reads feedback on each response
    takes_constraint: ClassVar[bool] = False  # the section `constraint` can add to its loss or rewards
    compares_responses: ClassVar[bool] = False  # compares responses to one prompt: group_size must be at least 2
    leaves_groups_out: ClassVar[bool] = False  # groups whose rewards are all equal are not trained on
    sampling_rounds: ClassVar[int] = 1  # at most, in a step; more than one if filtered groups are replaced

    mini_batch_prompts: Count | None = None
    """Prompts per optimizer step. None: rollout.prompts_per_step, one step per sampled batch."""
    epochs: Count = 1
    """Passes over a sampled batch."""
    old_logprobs: Literal["recompute", "rollout"] = "recompute"
    """The log-probs in the ratio's denominator. recompute: the trainer's, from a pass before the step; a batch with one
    optimizer step needs no such pass. rollout: the engine's, from sampling."""

    def mini_batches(self, prompts: int) -> int:
        """The optimizer steps of a pass over a sampled batch of so many `prompts`."""
        return prompts // (self.mini_batch_prompts or prompts)

    @property
    def corrects_sampling(self) -> bool:
        """Whether the loss corrects for responses that a policy other than the trained one sampled."""
        return self.old_logprobs == "rollout"

    def check_lengths(self, lengths: Lengths) -> None:
        """Check the algorithm's options against the run's limits.

        Raises:
            ConfigError: an option does not fit.
        """


class Aggregating(Online):
    """The base class of algorithms that aggregate a loss over tokens."""

    aggregation: Aggregation = "sequence_mean"
    """sequence_mean: mean over the tokens of each response, then over responses. token_mean: mean over all tokens.
    group_mean: mean over all tokens of a prompt's responses, then over prompts. sequence_sum: sum over the tokens of
    each response, then mean over responses. constant: sequence_sum divided by rollout.max_response_tokens."""


class PolicyGradient(Aggregating):
    takes_constraint: ClassVar[bool] = True
    estimator_in_loss: ClassVar[KLEstimator] = "k3"  # by default

    clip_low: ShareOrAll = 0.2
    """The ratio is clipped below 1 - clip_low."""
    clip_high: Positive = 0.2
    """The ratio is clipped above 1 + clip_high."""
    kl_coefficient: NonNegative = 0.001
    """Of KL(policy || reference). 0: no reference model is loaded."""
    kl_estimator: KLEstimator | None = None
    """k1, k2, k3: estimates from the sampled tokens. exact: a sum over the vocabulary, from both models' hidden states.
    Only k1 has the KL's gradient in the reward, and it has none in the loss. None: k1 in the reward; in the loss k3, of
    reinforce_plus_plus_baseline k2."""
    kl_in: KLPlace = "loss"
    """loss: a term of the loss. reward: a penalty on the reward; of methods that divide the reward by its deviation in
    the group, on the divided one."""
    entropy_coefficient: NonNegative = 0.0
    importance: Literal["none", "truncated", "masked"] = "none"
    """Importance weights pi_trainer / pi_engine, which correct for the train-inference mismatch and for older weights
    (rollout.staleness). truncated: at most importance_cap. masked: weights outside 1 / importance_cap ..
    importance_cap become 0."""
    importance_cap: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 2.0

    @property
    def estimator(self) -> KLEstimator:
        return self.kl_estimator or ("k1" if self.kl_in == "reward" else self.estimator_in_loss)

    @property
    def uses_reference(self) -> bool:
        return self.kl_coefficient > 0

    @property
    def compares_distributions(self) -> bool:
        return self.kl_coefficient > 0 and self.kl_estimator == "exact"

    @property
    def corrects_sampling(self) -> bool:
        return self.importance != "none" or super().corrects_sampling

    def _check(self):
        self.unused(self.kl_coefficient == 0, "while kl_coefficient is 0", "kl_estimator", "kl_in")
        if (self.estimator == "k1") != (self.kl_in == "reward"):
            use = "k2, k3 or exact, or kl_in: reward" if self.kl_in == "loss" else "k1, or kl_in: loss"
            raise at("kl_estimator", f"{self.estimator} in the {self.kl_in} lacks the KL's gradient. Use {use}")
        self.unused(self.importance == "none", "while importance is none", "importance_cap")
        if self.importance != "none" and self.old_logprobs == "rollout":
            raise at("importance", "compares old_logprobs with the engine's: with rollout they are the same")


class Clipped(PolicyGradient):
    dual_clip: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    """Upper bound of the ratio's effect on tokens with a negative advantage. None: no bound."""
