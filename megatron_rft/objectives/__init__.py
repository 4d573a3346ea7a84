"""The algorithms: pure functions of tensors. `config.algorithms` has their table and their options."""

from importlib import import_module

from megatron_rft.config import algorithms
from megatron_rft.config.algorithms.base import Algorithm
from megatron_rft.objectives.base import Objective, Setting


def build(options: Algorithm, setting: Setting | None = None) -> Objective:
    """Build the objective of a section: the class and the file have the names of the section's class and file."""
    module = type(options).__module__.replace(algorithms.__name__, __name__)
    return getattr(import_module(module), type(options).__name__)(options, setting or Setting())
