"""What algorithms share: their options, and what the rest of a recipe asks of any of them.

Other parts read the flags and properties of these classes, never an algorithm's name.
"""

from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import Field, model_validator

from megatron_rft.config.messages import at
from megatron_rft.config.sections import Count, NonNegative, Positive, Section, ShareOrAll

Aggregation = Literal["sequence_mean", "token_mean", "group_mean", "sequence_sum", "constant"]
KLEstimator = Literal["k1", "k2", "k3", "exact"]
KLPlace = Literal["loss", "reward"]
Trainer = Literal["rl", "sft", "offline"]


class Lengths(NamedTuple):
    """Numbers of tokens in an online run."""

    response: int  # rollout.max_response_tokens
    sequence: int  # the longest prompt with the longest response
    forward_only: int  # a micro-batch without a backward pass holds so many
    positions: int | None  # of the model; None: not known yet


class Algorithm(Section):
    """A section `algorithm`."""

    trainer: ClassVar[Trainer]
    of_user: ClassVar[bool] = False  # its class is in the user's own code
    pairs: ClassVar[bool] = False  # an example is a right and a wrong trajectory of one problem

    @property
    def uses_reference(self) -> bool:
        """Whether the loss or the rewards compare the policy with the frozen reference."""
        return False

    @property
    def teacher_average(self) -> float | None:
        """Rate of the moving average of the policy's weights that serves as a teacher. None: there is no average."""
        return None


class Online(Algorithm):
    """What every online algorithm has."""

    trainer: ClassVar[Trainer] = "rl"
    needs_critic: ClassVar[bool] = False
    has_ratio: ClassVar[bool] = True  # the loss has a ratio of new to old probabilities
    uses_feedback: ClassVar[bool] = False  # a teacher reads what is told of each response
    takes_constraint: ClassVar[bool] = False  # the section `constraint` can add to its loss or rewards
    compares_responses: ClassVar[bool] = False  # of one prompt: group_size must be 2 at least

    mini_batch_prompts: Count | None = None
    """Prompts per optimizer step. None: rollout.prompts_per_step, one step per sampled batch."""
    epochs: Count = 1
    """Passes over a sampled batch."""
    old_logprobs: Literal["recompute", "rollout"] = "recompute"
    """The ratio's denominator: the trainer's own pass before the step (left out where a batch gets one step only, whose
    own log-probs they then are), or what the engine said while sampling."""

    @property
    def corrects_sampling(self) -> bool:
        """Whether the loss allows for responses that another policy sampled than the one that learns."""
        return self.old_logprobs == "rollout"

    @property
    def leaves_groups_out(self) -> bool:
        """Whether groups whose rewards are all equal are not trained on."""
        return False

    @property
    def sampling_rounds(self) -> int:
        """Rounds of sampling in a step, at most; more than one where groups are replaced."""
        return 1

    def check_lengths(self, lengths: Lengths) -> None:
        """What the algorithm adds to a sequence, or takes from it, fits.

        Raises:
            ConfigError: it does not.
        """


class Aggregating(Online):
    """With a loss that makes one number of all tokens."""

    aggregation: Aggregation = "sequence_mean"
    """sequence_mean: tokens are averaged in each response, then responses. token_mean: over all tokens at once.
    group_mean: over all tokens of a prompt's responses, then over prompts. sequence_sum: tokens are added up in each
    response, then responses averaged. constant: the same, divided by rollout.max_response_tokens."""


class PolicyGradient(Aggregating):
    takes_constraint: ClassVar[bool] = True

    clip_low: ShareOrAll = 0.2
    """The ratio is clipped below 1 - clip_low."""
    clip_high: Positive = 0.2
    """The ratio is clipped above 1 + clip_high."""
    kl_coefficient: NonNegative = 0.001
    """Of KL(policy || reference). 0: no reference model is loaded."""
    kl_estimator: KLEstimator = "k3"
    """k1, k2, k3: from the sampled tokens alone. exact: a sum over the vocabulary, from both models' hidden states."""
    kl_in: KLPlace = "loss"
    """A term of the loss, or a penalty on the reward that the advantages come from."""
    entropy_coefficient: NonNegative = 0.0
    importance: Literal["none", "truncated", "masked"] = "none"
    """Weights pi_trainer / pi_engine for rollouts whose engine disagrees with the trainer, or had older weights
    (rollout.staleness). truncated: at most importance_cap. masked: tokens whose weight is outside 1 / importance_cap ..
    importance_cap teach nothing."""
    importance_cap: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 2.0

    @property
    def uses_reference(self) -> bool:
        return self.kl_coefficient > 0

    @property
    def corrects_sampling(self) -> bool:
        return self.importance != "none" or super().corrects_sampling

    @model_validator(mode="after")
    def _check_dead(self):
        for key, switch, off in (
            ("kl_estimator", "kl_coefficient", 0),
            ("kl_in", "kl_coefficient", 0),
            ("importance_cap", "importance", "none"),
        ):
            if self.differs(key) and getattr(self, switch) == off:
                raise at(key, f"does nothing while {switch} is {off}")
        if self.importance != "none" and self.old_logprobs == "rollout":
            raise at(
                "importance", "compares old_logprobs with the engine's: with old_logprobs rollout they are the same"
            )
        return self


class Clipped(PolicyGradient):
    dual_clip: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    """A negative advantage counts at most so many times, however large the ratio. None: without a bound."""
