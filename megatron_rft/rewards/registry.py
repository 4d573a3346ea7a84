"""Builds a reward from a recipe's section `reward`. The table of all kinds is `KINDS` in config/rewards.py."""

import importlib
import os
import sys
from typing import Any

from megatron_rft.config.rewards import KINDS
from megatron_rft.rewards.base import Reward
from megatron_rft.utils.errors import ConfigError, did_you_mean


def build(config: Any) -> Reward:
    """The reward of a recipe's section: its class gets the options that its kind reads, under their names."""
    if config.kind not in KINDS:
        raise ConfigError(
            f"reward.kind={config.kind!r}: there is {', '.join(KINDS)}.{did_you_mean(config.kind, KINDS)}"
        )
    kind = KINDS[config.kind]
    module, _, name = kind.made_by.partition(":")
    make = getattr(importlib.import_module(f"megatron_rft.rewards.{module}"), name)
    reward = make(**{option: _option(config, option) for option in kind.reads})
    if (isolation := getattr(reward, "isolation", None)) and os.environ.get("RANK", "0") == "0":
        print(f"programs run in {isolation}", file=sys.stderr, flush=True)
    return reward


def _option(config: Any, name: str) -> Any:
    """Return an option's value, with sections inside it built as rewards."""
    if name == "parts":
        from megatron_rft.rewards.combine import Part

        return [Part(part.name or part.kind, build(part), part.weight, part.shaping) for part in config.parts]
    if name == "kinds":
        return {row: build(each) for row, each in config.kinds.items()}
    return getattr(config, name)
