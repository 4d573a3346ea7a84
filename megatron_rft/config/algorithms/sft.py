"""Supervised fine-tuning."""

from typing import ClassVar, Literal

from megatron_rft.config.algorithms.base import Algorithm, Trainer
from megatron_rft.config.sections import Count


class SFT(Algorithm):
    trainer: ClassVar[Trainer] = "sft"

    name: Literal["sft"] = "sft"
    batch_sequences: Count = 64
    """Sequences per optimizer step."""
