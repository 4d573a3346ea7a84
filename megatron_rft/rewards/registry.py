"""Builds a reward from a recipe's section `reward`. `REWARDS` in config/rewards.py is the table of all kinds."""

import importlib
from typing import Any

from megatron_rft.config.rewards import REWARDS, RewardOptions
from megatron_rft.rewards.base import Reward


def build(section: RewardOptions) -> Reward:
    """The reward of a recipe's section: its class gets the options of its kind, under their names."""
    module, _, name = REWARDS[section.kind][1].rpartition(".")
    make = getattr(importlib.import_module(f"megatron_rft.rewards.{module}"), name)
    own = type(section).model_fields.keys() - RewardOptions.model_fields.keys()
    reward = make(**{option: _option(section, option) for option in own})
    reward.max_error_share = section.max_error_share
    return reward


def _option(section: RewardOptions, name: str) -> Any:
    """Return an option's value, with sections inside it built as rewards."""
    if name == "parts":
        from megatron_rft.rewards.combine import Term

        return [Term(part.name or part.kind, build(part), part.weight, part.shaping) for part in section.parts]
    if name == "kinds":
        return {row: build(each) for row, each in section.kinds.items()}
    return getattr(section, name)
