"""The section `pipo`: the plug-in that verifies each policy step by the change of the reward."""

from typing import Annotated, Literal

from pydantic import Field

from megatron_rft.config.sections import Positive, Section, ShareOrAll


class PIPO(Section):
    window: Annotated[int, Field(ge=2)] = 8
    """Number of previous batch means against which the improvement is measured."""
    rectification: ShareOrAll = 0.1
    """Factor of a negative improvement."""
    learning_rate: Positive = 1e-6
    """Learning rate of the verification step."""
    xi_max: Positive = 10.0
    """The improvement is clipped to ± this."""
    optimizer_state: Literal["shared", "own"] = "shared"
    """Adam's moments in the verification step. shared: those of the policy's steps. own: a second set, which takes as
    much memory again."""
