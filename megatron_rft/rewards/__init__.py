"""Verifiers: from a problem and a response to a reward."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_rft.rewards.base import Reward
    from megatron_rft.rewards.registry import build


def __getattr__(name: str) -> Any:
    """Imported on demand: grading processes import `rewards.equivalence`, and must not load torch with it."""
    if name == "Reward":
        from megatron_rft.rewards.base import Reward

        return Reward
    if name == "build":
        from megatron_rft.rewards.registry import build

        return build
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
