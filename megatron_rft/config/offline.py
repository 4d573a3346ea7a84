"""The section `generation`, and the options without effect in offline training and in generation."""

from typing import Annotated

from pydantic import Field

from megatron_rft.config.sections import Count, Section

UNUSED_IN_TRAINING = (
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
    """Options of the trajectory store that trainer generate writes into run.output_dir."""

    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Share of the kept problems that is held out for validation."""
    problems_per_shard: Count = 64
    """Problems that are sampled together and written into one file. A killed worker loses at most one such shard."""
