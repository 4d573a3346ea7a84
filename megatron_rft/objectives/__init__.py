"""The algorithms: pure mathematics on tensors. `OBJECTIVES` is the table of names that a recipe may use."""

from megatron_rft.objectives.cispo import CISPO
from megatron_rft.objectives.dapo import DAPO
from megatron_rft.objectives.grpo import GRPO, RLOO, DrGRPO
from megatron_rft.objectives.gspo import GSPO
from megatron_rft.objectives.plugins.dynamic import DynamicConstraint
from megatron_rft.objectives.plugins.pipo import PIPO
from megatron_rft.objectives.ppo import PPO
from megatron_rft.objectives.reinforce import ReinforcePlusPlus, ReinforcePlusPlusBaseline
from megatron_rft.objectives.sdpo import SDPO
from megatron_rft.objectives.sft import SFT

OBJECTIVES = {
    "ppo": PPO,
    "grpo": GRPO,
    "dr_grpo": DrGRPO,
    "gspo": GSPO,
    "dapo": DAPO,
    "cispo": CISPO,
    "rloo": RLOO,
    "reinforce_plus_plus": ReinforcePlusPlus,
    "reinforce_plus_plus_baseline": ReinforcePlusPlusBaseline,
    "sdpo": SDPO,
    "sft": SFT,
}
PLUGINS = {"dynamic": DynamicConstraint, "pipo": PIPO}
"""Plug-ins: each takes an objective and gives back an objective."""
