"""The algorithms: pure mathematics on tensors. `OBJECTIVES` is the table of names that a recipe may use."""

from megatron_rft.objectives.grpo import GRPO
from megatron_rft.objectives.plugins.pipo import PIPO
from megatron_rft.objectives.sft import SFT

OBJECTIVES = {"grpo": GRPO, "sft": SFT}
PLUGINS = {"pipo": PIPO}
