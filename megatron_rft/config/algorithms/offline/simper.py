"""SimPER: compares the inverse perplexities of both sides."""

from typing import Literal

from megatron_rft.config.algorithms.offline.base import Pairwise


class SimPER(Pairwise):
    name: Literal["simper"] = "simper"
