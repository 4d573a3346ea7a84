"""Which rewards there are, and how a recipe's `reward` section builds one."""

import os
import sys
from collections.abc import Callable
from typing import Any

from megatron_rft.rewards.base import Reward
from megatron_rft.utils.errors import ConfigError, did_you_mean


def build(config: Any) -> Reward:
    """The reward of a recipe's section."""
    if config.kind not in KINDS:
        raise ConfigError(
            f"reward.kind={config.kind!r}: there is {', '.join(KINDS)}.{did_you_mean(config.kind, KINDS)}"
        )
    return KINDS[config.kind](config)


def _math(config: Any) -> Reward:
    from megatron_rft.rewards.math import MathReward

    return MathReward(config.timeout_s, config.workers, config.answer)


def _code(config: Any) -> Reward:
    from megatron_rft.rewards.code import CodeReward

    reward = CodeReward(
        config.timeout_s, config.memory_mb, config.workers, config.without_container, config.row_timeout_s
    )
    if os.environ.get("RANK", "0") == "0":
        print(f"programs run in {reward.isolation}", file=sys.stderr, flush=True)
    return reward


def _tool(config: Any) -> Reward:
    from megatron_rft.rewards.tools.verifier import ToolReward

    return ToolReward(config.rules)


def _choice(config: Any) -> Reward:
    from megatron_rft.rewards.choice import ChoiceReward

    return ChoiceReward()


def _format(config: Any) -> Reward:
    from megatron_rft.rewards.choice import FormatReward

    return FormatReward(config.tags)


def _model(config: Any) -> Reward:
    from megatron_rft.rewards.model import ModelReward

    return ModelReward(config.model, config.template, config.max_tokens, config.batch)


def _server(config: Any) -> Reward:
    from megatron_rft.rewards.model import ServerReward

    return ServerReward(config.url, config.timeout_s, config.batch)


def _sum(config: Any) -> Reward:
    from megatron_rft.rewards.combine import Part, SumReward

    names = [part.name or part.kind for part in config.parts]
    return SumReward(
        [Part(name, build(part), part.weight, part.shaping) for name, part in zip(names, config.parts, strict=True)]
    )


def _by_row(config: Any) -> Reward:
    from megatron_rft.rewards.combine import ByRowReward

    return ByRowReward(config.field, {name: build(each) for name, each in config.kinds.items()})


def _own(config: Any) -> Reward:
    from megatron_rft.rewards.user_reward import OwnReward

    return OwnReward(config.function, config.maximum)


KINDS: dict[str, Callable[[Any], Reward]] = {
    "math": _math,
    "code": _code,
    "tool": _tool,
    "choice": _choice,
    "format": _format,
    "model": _model,
    "server": _server,
    "sum": _sum,
    "by_row": _by_row,
    "own": _own,
}
