"""The algorithms: pure mathematics on tensors. megatron_rft/config/algorithms has their table and their options."""

from importlib import import_module

from megatron_rft.config import algorithms
from megatron_rft.config.algorithms.base import Algorithm
from megatron_rft.objectives.base import Objective, Setting


def build(options: Algorithm, setting: Setting | None = None) -> Objective:
    """The objective of a section: the class of the section's name, in the file of the section's file's name."""
    module = type(options).__module__.replace(algorithms.__name__, __name__)
    return getattr(import_module(module), type(options).__name__)(options, setting or Setting())
