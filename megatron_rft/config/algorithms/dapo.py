"""DAPO: leaves out groups of equal rewards and penalises long responses."""

from typing import Literal

from pydantic import model_validator

from megatron_rft.config.algorithms.base import Aggregation, Lengths
from megatron_rft.config.algorithms.grpo import GRPO
from megatron_rft.config.messages import at
from megatron_rft.config.sections import Count, Natural, Positive
from megatron_rft.utils.errors import ConfigError


class DAPO(GRPO):
    name: Literal["dapo"] = "dapo"
    clip_high: Positive = 0.28
    aggregation: Aggregation = "group_mean"
    filter_groups: bool = True
    """Leave out groups whose rewards are all equal, and sample others in their place."""
    max_rounds: Count = 4
    """Maximum rounds of sampling in a step. After the last, the step trains on the groups that were kept."""
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

    @model_validator(mode="after")
    def _check_switches(self):
        if self.differs("max_rounds") and not self.filter_groups:
            raise at("max_rounds", "does nothing while filter_groups is false")
        if self.differs("overlong_coefficient") and not self.overlong_buffer:
            raise at("overlong_coefficient", "does nothing while overlong_buffer is 0")
        return self
