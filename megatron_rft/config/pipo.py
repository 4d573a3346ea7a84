"""The `pipo` section of a recipe: the plug-in that verifies each policy step by what it did to the reward."""

from typing import Annotated, Literal

from pydantic import Field

from megatron_rft.config.sections import Positive, Section, ShareOrAll


class PIPO(Section):
    window: Annotated[int, Field(ge=2)] = 8
    """Batch means that the improvement is measured against; their spread needs two at least."""
    rectification: ShareOrAll = 0.1
    """Factor of a negative improvement."""
    learning_rate: Positive = 1e-6
    """Of the verification step."""
    xi_max: Positive = 10.0
    """The improvement is clipped to ± this."""
    optimizer_state: Literal["shared", "own"] = "shared"
    """Adam's moments of the verification step: those of the policy's steps, or a second set (as much memory again)."""
