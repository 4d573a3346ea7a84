"""The sections `algorithm`, `pipo` and `critic` of a recipe. A section holds what differs from its parent's.

Their names and defaults are those of megatron_rft.objectives, which says what they compute.
"""

import string
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from megatron_rft.config.messages import at
from megatron_rft.config.sections import Count, Natural, NonNegative, Positive, Section, Share, ShareOrAll

Aggregation = Literal["sequence_mean", "token_mean", "group_mean", "sequence_sum", "constant"]
KLEstimator = Literal["k1", "k2", "k3", "exact"]
KLPlace = Literal["loss", "reward"]


class Online(Section):
    """What every online algorithm has."""

    compares_responses: ClassVar[bool] = False  # of one prompt: group_size must be 2 at least
    mini_batch_prompts: Count | None = None
    """Prompts per optimizer step. None: rollout.prompts_per_step, one step per sampled batch."""
    epochs: Count = 1
    """Passes over a sampled batch."""
    old_logprobs: Literal["recompute", "rollout"] = "recompute"
    """The ratio's denominator: the trainer's own pass before the step (left out where a batch gets one step only, whose
    own log-probs they then are), or what the engine said while sampling."""


class Aggregating(Online):
    """With a loss that makes one number of all tokens."""

    aggregation: Aggregation = "sequence_mean"
    """sequence_mean: tokens are averaged in each response, then responses. token_mean: over all tokens at once.
    group_mean: over all tokens of a prompt's responses, then over prompts. sequence_sum: tokens are added up in each
    response, then responses averaged. constant: the same, divided by rollout.max_response_tokens."""


class PolicyGradient(Aggregating):
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


class GRPO(Clipped):
    name: Literal["grpo"] = "grpo"
    compares_responses: ClassVar[bool] = True


class DrGRPO(GRPO):
    name: Literal["dr_grpo"] = "dr_grpo"
    aggregation: Aggregation = "constant"
    kl_coefficient: NonNegative = 0.0


class RLOO(GRPO):
    name: Literal["rloo"] = "rloo"
    kl_estimator: KLEstimator = "k1"
    kl_in: KLPlace = "reward"


class GSPO(GRPO):
    name: Literal["gspo"] = "gspo"
    clip_low: ShareOrAll = 3e-4
    clip_high: Positive = 4e-4


class DAPO(GRPO):
    name: Literal["dapo"] = "dapo"
    clip_high: Positive = 0.28
    aggregation: Aggregation = "group_mean"
    filter_groups: bool = True
    """Leave out groups whose rewards are all equal, and sample others in their place."""
    max_rounds: Count = 4
    """Rounds of sampling in a step. When they run out, the step trains on the groups that were kept."""
    overlong_buffer: Natural = 0
    """Tokens below rollout.max_response_tokens from which on a penalty on the length grows, up to 1 at the limit. It
    shapes the advantages alone. 0: no penalty."""
    overlong_coefficient: Positive = 1.0
    """Of that penalty."""

    @model_validator(mode="after")
    def _check_switches(self):
        if self.differs("max_rounds") and not self.filter_groups:
            raise at("max_rounds", "does nothing while filter_groups is false")
        if self.differs("overlong_coefficient") and not self.overlong_buffer:
            raise at("overlong_coefficient", "does nothing while overlong_buffer is 0")
        return self


class CISPO(PolicyGradient):
    name: Literal["cispo"] = "cispo"
    compares_responses: ClassVar[bool] = True
    clip_low: ShareOrAll = 1.0
    clip_high: Positive = 4.0
    aggregation: Aggregation = "token_mean"
    kl_coefficient: NonNegative = 0.0


class ReinforcePlusPlus(Clipped):
    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    aggregation: Aggregation = "token_mean"
    kl_estimator: KLEstimator = "k1"
    kl_in: KLPlace = "reward"
    gamma: ShareOrAll = 1.0
    """Discount per token."""


class ReinforcePlusPlusBaseline(Clipped):
    name: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"
    compares_responses: ClassVar[bool] = True
    aggregation: Aggregation = "token_mean"
    kl_estimator: KLEstimator = "k2"


class PPO(Clipped):
    """Its critic has a section of its own."""

    name: Literal["ppo"] = "ppo"
    kl_estimator: KLEstimator = "k1"
    kl_in: KLPlace = "reward"
    gamma: ShareOrAll = 1.0
    """Discount per token."""
    lam: ShareOrAll = 0.95
    """Of generalised advantage estimation: 0 trusts the critic, 1 the rewards."""
    whiten_rewards: bool = False
    """Mean 0 and standard deviation 1 over the sampled batch."""
    whiten_advantages: bool = True
    """The same for the advantages of all tokens."""


class SDPO(Aggregating):
    name: Literal["sdpo"] = "sdpo"
    aggregation: Aggregation = "token_mean"
    feedback: list[Literal["sibling", "error", "solution"]] = ["sibling", "error"]
    """What the teacher is told of a response, all that there is of: a right response to the same problem, the reason
    that the verifier gave for less than full marks, the reference solution (where there is no right sibling)."""
    solution_field: str = "solution"
    """The row's field with the reference solution."""
    max_feedback_tokens: Count = 1024
    """What is told is cut to so many tokens."""
    teacher_template: str = "{feedback}\n\n{prompt}"
    """The teacher's prompt, which the chat template then wraps where data.chat is set."""
    solution_template: str = "A correct solution to the problem:\n{}"
    """How a right sibling or the reference solution is shown."""
    error_template: str = "Feedback on an unsuccessful attempt:\n{}"
    """How the verifier's reason is shown."""
    teacher_rate: Annotated[float, Field(gt=0, lt=1)] | None = None
    """The teacher is a moving average of the policy with this rate per step. None: the policy itself."""
    clip_low: Share = 0.2
    """With pipo: the ratio of its verification step is clipped below 1 - clip_low."""
    clip_high: Positive = 0.2
    """With pipo: and above 1 + clip_high."""

    @model_validator(mode="after")
    def _check_feedback(self):
        if not self.feedback:
            raise at("feedback", "is empty: the teacher would know no more than the policy, and there would be no loss")
        if len(set(self.feedback)) < len(self.feedback):
            raise at("feedback", f"names a source twice: {', '.join(self.feedback)}")
        for key, source in (
            ("solution_field", {"solution"}),
            ("solution_template", {"solution", "sibling"}),
            ("error_template", {"error"}),
        ):
            if self.differs(key) and not source & set(self.feedback):
                raise at(key, f"does nothing while feedback is {', '.join(self.feedback)}")
        return self

    @field_validator("teacher_template", "solution_template", "error_template")
    @classmethod
    def _parts(cls, value, info):
        wanted = {"prompt", "feedback"} if info.field_name == "teacher_template" else {""}
        try:
            found = {name for _, name, _, _ in string.Formatter().parse(value) if name is not None}
        except ValueError as error:
            raise ValueError(f"{value!r} is no format string: {error}") from None
        if found != wanted:
            braces = " and ".join(f"{{{name}}}" for name in sorted(wanted))
            raise ValueError(f"{value!r} must have {braces}, and nothing else in braces")
        return value


class Own(Online):
    """An algorithm of the user's (docs/own_algorithm.md). What is not here are fields of its class."""

    model_config = ConfigDict(extra="allow")

    name: Literal["own"] = "own"
    objective: str
    """The class: my_file.py:Name, its path relative to the working directory, or my_module:Name."""


class SFT(Section):
    name: Literal["sft"] = "sft"
    batch_sequences: Count = 64
    """Sequences per optimizer step."""


class PIPO(Section):
    window: Annotated[int, Field(ge=2)] = 8
    """Batch means that the improvement is measured against; their spread needs two at least."""
    rectification: ShareOrAll = 0.1
    """Factor of a negative improvement."""
    learning_rate: Positive = 1e-6
    """Of the verification step."""
    xi_max: Positive = 10.0
    """The improvement is clipped to ± this."""
    optimizer_state: Literal["shared", "own"] = "shared"
    """Adam's moments of the verification step: those of the policy's steps, or a second set (as much memory again)."""


class Critic(Section):
    """PPO's value model: the architecture of the policy with a value head, in the same parallel layout. What is not
    here is the policy's: the rest of `optimizer`, `megatron`, `batching`."""

    path: str | None = None
    """Folder or hub name of the weights that it starts from. None: the policy's."""
    lr: Positive
    """Learning rate after the warmup."""
    lr_warmup_steps: Natural = 0
    """Optimizer steps over which the rate rises linearly from 0."""
    clip_grad: NonNegative = 1.0
    """Largest norm of the whole gradient; 0 does not clip."""
    value_clip: Positive | None = 0.2
    """A value moves at most so far from that of the sampled batch before the loss stops following. null: without."""
    warmup_steps: Natural = 0
    """Training steps at the start in which the critic alone learns."""


Algorithm = (
    PPO | GRPO | DrGRPO | GSPO | DAPO | CISPO | RLOO | ReinforcePlusPlus | ReinforcePlusPlusBaseline | SDPO | Own | SFT
)
