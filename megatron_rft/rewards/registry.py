"""Builds a reward from a recipe's section `reward`. `REWARDS` in config/rewards.py is the table of all kinds."""

import importlib
from typing import Any

from megatron_rft.config.rewards import REWARDS, RewardOptions
from megatron_rft.rewards.base import Reward


def build(section: RewardOptions) -> Reward:
    """The reward of a section: its class gets the options of its kind by name, with sections in them as rewards."""
    module, _, name = REWARDS[section.kind][1].rpartition(".")
    make = getattr(importlib.import_module(f"megatron_rft.rewards.{module}"), name)
    names = type(section).model_fields.keys() - RewardOptions.model_fields.keys()
    own: dict[str, Any] = {name: getattr(section, name) for name in names}
    if "parts" in own:
        from megatron_rft.rewards.combine import Term

        own["parts"] = [Term(each.name or each.kind, build(each), each.weight, each.shaping) for each in own["parts"]]
    if "kinds" in own:
        own["kinds"] = {row: build(each) for row, each in own["kinds"].items()}
    reward = make(**own)
    reward.max_error_share = section.max_error_share
    return reward
