"""The section `algorithm` of a recipe: the options of each algorithm and their defaults. No torch."""

from megatron_rft.config.algorithms.offline import OFFLINE
from megatron_rft.config.algorithms.online import ONLINE

ALGORITHMS = ONLINE | OFFLINE
"""By `algorithm.name`: the section, and the objective that `megatron_rft.objectives.build` makes of it."""

SECTIONS = {name: section for name, (section, _) in ALGORITHMS.items()}
