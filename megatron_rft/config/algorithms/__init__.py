"""The section `algorithm` of a recipe: the options of each algorithm and their defaults. No torch.

`grpo.GRPO` is the class GRPO in config/algorithms/grpo.py. Its objective has the same class and file name under
objectives/ (`megatron_rft.objectives.build`).
"""

from functools import reduce
from importlib import import_module
from operator import or_

from megatron_rft.config.algorithms.base import Algorithm
from megatron_rft.config.algorithms.own import Own

ALGORITHMS = (
    "ppo.PPO",
    "grpo.GRPO",
    "grpo.DrGRPO",
    "gspo.GSPO",
    "dapo.DAPO",
    "cispo.CISPO",
    "grpo.RLOO",
    "reinforce.ReinforcePlusPlus",
    "reinforce.ReinforcePlusPlusBaseline",
    "sdpo.SDPO",
    "sft.SFT",
    "offline.rft.RFT",
    "offline.dpo.DPO",
    "offline.rpo.RPO",
    "offline.ipo.IPO",
    "offline.simpo.SimPO",
    "offline.simper.SimPER",
    "offline.kto.KTO",
    "offline.a_star_po.AStarPO",
    "offline.off_rl.OffRL",
    "offline.fpa.FPA",
)
"""The package's algorithms, one line each."""


def _section(path: str) -> type[Algorithm]:
    module, _, name = path.rpartition(".")
    return getattr(import_module(f"{__name__}.{module}"), name)


SECTIONS = {section.model_fields["name"].default: section for section in (*map(_section, ALGORITHMS), Own)}
"""The sections by `algorithm.name`."""

AnyAlgorithm = reduce(or_, SECTIONS.values())
