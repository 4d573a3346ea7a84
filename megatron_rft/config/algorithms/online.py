"""The sections of the online algorithms, and their table. `objectives/` has their mathematics. No torch."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from megatron_rft.config.algorithms.base import (
    Aggregating,
    Aggregation,
    Clipped,
    KLEstimator,
    KLPlace,
    Lengths,
    Online,
    PolicyGradient,
)
from megatron_rft.config.messages import at, check_braces
from megatron_rft.config.plugins import Teaching
from megatron_rft.config.sections import Count, FilePath, Natural, NonNegative, Positive, Section, Share, ShareOrAll
from megatron_rft.utils.errors import ConfigError


class PPO(Clipped, name="ppo"):
    """The critic has a separate section."""

    needs_critic: ClassVar[bool] = True

    kl_in: KLPlace = "reward"
    gamma: ShareOrAll = 1.0
    """Discount per token."""
    lam: ShareOrAll = 0.95
    """lambda of generalised advantage estimation: 0 relies on the critic, 1 on the rewards."""
    whiten_rewards: bool = False
    """Normalise rewards to mean 0 and standard deviation 1 over the sampled batch."""
    whiten_advantages: bool = True
    """The same for the advantages of all tokens."""

    def _check(self):
        self.unused(not self.gamma, "while gamma is 0: no later token counts", "lam")


class Critic(Section):
    """PPO's value model: the policy's architecture with a value head. The other options of `optimizer`, and `megatron`
    and `batching`, apply to both."""

    path: FilePath | None = None
    """Folder or hub name of the initial weights. None: the policy's."""
    lr: Positive
    """Learning rate after the warmup."""
    lr_warmup_steps: Natural = 0
    """Optimizer steps over which the rate rises linearly from 0."""
    clip_grad: NonNegative = 1.0
    """Maximum norm of the whole gradient; 0 does not clip."""
    value_clip: NonNegative = 0.2
    """Clip a value's change since sampling to this much in the loss; 0 does not clip."""
    warmup_steps: Natural = 0
    """Training steps at the start in which only the critic is updated."""


@dataclass(frozen=True)
class Setting:
    """The run's settings that an algorithm or a plug-in reads besides its own options."""

    mini_batches: int = 1  # of a sampled batch, each an optimizer step
    max_response_tokens: int = 1  # the sampler's limit; aggregation "constant" divides by it
    critic: Critic | None = None
    reference: bool = False  # whether there is a model.reference
    staleness: int = 0  # of a batch, in steps: rollout.staleness
    recomputes: bool = True  # algorithm.old_logprobs; otherwise they are the engine's, which every base reads


DEFAULT = Setting()


class GRPO(Clipped, name="grpo"):
    compares_responses: ClassVar[bool] = True


class DrGRPO(GRPO, name="dr_grpo"):
    aggregation: Aggregation = "constant"
    kl_coefficient: NonNegative = 0.0


class RLOO(GRPO, name="rloo"):
    aggregation: Aggregation = "sequence_sum"
    kl_in: KLPlace = "reward"


class GSPO(GRPO, name="gspo"):
    """One importance ratio per response."""

    clip_low: ShareOrAll = 3e-4
    clip_high: Positive = 4e-4


class DAPO(GRPO, name="dapo"):
    """Leaves out groups of equal rewards and penalises long responses."""

    clip_high: Positive = 0.28
    aggregation: Aggregation = "group_mean"
    filter_groups: bool = True
    """Leave out groups whose rewards are all equal, and sample others in their place."""
    max_rounds: Count = 4
    """Maximum rounds of sampling in a step. After the last, the step trains on the groups that were kept, if any."""
    overlong_buffer: Natural = 0
    """A length penalty grows from 0 at this many tokens below rollout.max_response_tokens to 1 at the limit. It affects
    only the advantages. 0: no penalty."""
    overlong_coefficient: Positive = 1.0
    """Factor of the length penalty."""

    @property
    def leaves_groups_out(self) -> bool:
        return self.filter_groups

    @property
    def sampling_rounds(self) -> int:
        return self.max_rounds if self.filter_groups else 1

    def check_lengths(self, lengths: Lengths) -> None:
        if self.overlong_buffer >= lengths.response:
            raise ConfigError(
                f"algorithm.overlong_buffer: {self.overlong_buffer} tokens must be fewer than "
                f"rollout.max_response_tokens, {lengths.response}: every response would be penalised"
            )

    def _check(self):
        self.unused(not self.filter_groups, "while filter_groups is false", "max_rounds")
        self.unused(not self.overlong_buffer, "while overlong_buffer is 0", "overlong_coefficient")


class CISPO(PolicyGradient, name="cispo"):
    """Clips the ratio instead of its product with the advantage."""

    compares_responses: ClassVar[bool] = True
    clip_low: ShareOrAll = 1.0
    clip_high: Positive = 4.0
    aggregation: Aggregation = "token_mean"
    kl_coefficient: NonNegative = 0.0


class ReinforcePlusPlus(Clipped, name="reinforce_plus_plus"):
    aggregation: Aggregation = "token_mean"
    kl_in: KLPlace = "reward"
    gamma: ShareOrAll = 1.0
    """Discount per token."""


class ReinforcePlusPlusBaseline(Clipped, name="reinforce_plus_plus_baseline"):
    compares_responses: ClassVar[bool] = True
    estimator_in_loss: ClassVar[KLEstimator] = "k2"
    aggregation: Aggregation = "token_mean"


class SDPO(Aggregating, name="sdpo"):
    """Self-distillation from a teacher that reads feedback."""

    compares_distributions: ClassVar[bool] = True
    has_ratio: ClassVar[bool] = False
    uses_feedback: ClassVar[bool] = True

    aggregation: Aggregation = "token_mean"
    feedback: list[Literal["sibling", "error", "solution"]] = ["sibling", "error"]
    """Sources of the teacher's feedback on a response. sibling: a right response to the same problem. error: the
    verifier's reason for a reward below the maximum. solution: the reference solution, if there is no right sibling."""
    solution_field: str = "solution"
    """The row's field with the reference solution."""
    max_feedback_tokens: Count = 1024
    """Feedback is cut to this many tokens."""
    teacher_template: str = "{feedback}\n\n{prompt}"
    """The teacher's prompt. The chat template is applied to it if data.chat is set."""
    solution_template: str = "A correct solution to the problem:\n{}"
    """The text around a right sibling or the reference solution."""
    error_template: str = "Feedback on an unsuccessful attempt:\n{}"
    """The text around the verifier's reason."""
    teacher_rate: Annotated[float, Field(gt=0, lt=1)] | None = None
    """The teacher is a moving average of the policy with this rate per step. None: the policy itself."""
    importance_cap: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    """Weight each token's distillation loss by pi / pi_old, at most this. None: no weight. SDPO's code uses 2."""
    clip_low: Share = 0.2
    """With pipo: the ratio of the verification step is clipped below 1 - clip_low."""
    clip_high: Positive = 0.2
    """With pipo: the ratio of the verification step is clipped above 1 + clip_high."""

    @property
    def uses_old_logprobs(self) -> bool:
        return self.importance_cap is not None

    @property
    def compares_responses(self) -> bool:
        """True if right responses to the same prompt are the only feedback."""
        return self.feedback == ["sibling"]

    @property
    def teacher_average(self) -> float | None:
        return self.teacher_rate

    def check_lengths(self, lengths: Lengths) -> None:
        told, budget, positions = lengths.sequence + self.max_feedback_tokens, lengths.forward_only, lengths.positions
        if told > budget or (positions and told > positions):
            what = f"batching.forward_only_tokens, {budget}" if told > budget else f"{positions} positions"
            raise ConfigError(
                f"algorithm.max_feedback_tokens: with {self.max_feedback_tokens} more for the teacher a sequence "
                f"may have {told} tokens, more than {what}"
            )

    def _check(self):
        if not self.feedback:
            raise at("feedback", "is empty: without feedback the teacher equals the policy and the loss is 0")
        if len(set(self.feedback)) < len(self.feedback):
            raise at("feedback", f"names a source twice: {', '.join(self.feedback)}")
        given, why = set(self.feedback), f"while feedback is {', '.join(self.feedback)}"
        self.unused("solution" not in given, why, "solution_field")
        self.unused(not given & {"solution", "sibling"}, why, "solution_template")
        self.unused("error" not in given, why, "error_template")
        check_braces("teacher_template", self.teacher_template, {"feedback", "prompt"})
        check_braces("solution_template", self.solution_template, {""})
        check_braces("error_template", self.error_template, {""})


class Distillation(Teaching, Online, name="distil"):
    """Distillation from a teacher on the student's own samples, without a reward."""

    compares_distributions: ClassVar[bool] = True
    has_ratio: ClassVar[bool] = False
    uses_rewards: ClassVar[bool] = False
    uses_old_logprobs: ClassVar[bool] = False


class OwnAlgorithm(Online, name="own", extra="allow"):
    """docs/own_algorithm.md. Further options belong to the section of the user's class."""

    of_user: ClassVar[bool] = True
    uses_reference: ClassVar[bool] = True  # it may use one: training/user_algorithm.py checks it with the user's class

    objective: str
    """The class: my_file.py:Name (relative to the working directory) or my_module:Name."""

    @property
    def corrects_sampling(self) -> bool:
        return self.extra.get("importance", "none") != "none" or super().corrects_sampling


ONLINE: dict[str, tuple[type[Online], str | None]] = {
    # algorithm.name: (section, MODULE.CLASS of its objective under objectives/)
    "ppo": (PPO, "ppo.PPO"),
    "grpo": (GRPO, "grpo.GRPO"),
    "dr_grpo": (DrGRPO, "grpo.DrGRPO"),
    "gspo": (GSPO, "gspo.GSPO"),
    "dapo": (DAPO, "dapo.DAPO"),
    "cispo": (CISPO, "cispo.CISPO"),
    "rloo": (RLOO, "grpo.RLOO"),
    "reinforce_plus_plus": (ReinforcePlusPlus, "reinforce.ReinforcePlusPlus"),
    "reinforce_plus_plus_baseline": (ReinforcePlusPlusBaseline, "reinforce.ReinforcePlusPlusBaseline"),
    "sdpo": (SDPO, "sdpo.SDPO"),
    "distil": (Distillation, "distil.Distil"),
    "own": (OwnAlgorithm, None),  # training/user_algorithm.py builds it
}
