"""SDPO: self-distillation from a teacher that reads feedback."""

import string
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from megatron_rft.config.algorithms.base import Aggregating, Aggregation, Lengths
from megatron_rft.config.messages import at
from megatron_rft.config.sections import Count, Positive, Share
from megatron_rft.utils.errors import ConfigError


class SDPO(Aggregating):
    name: Literal["sdpo"] = "sdpo"
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

    @model_validator(mode="after")
    def _check_feedback(self):
        if not self.feedback:
            raise at("feedback", "is empty: without feedback the teacher equals the policy and the loss is 0")
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
