"""The algorithms: pure functions of tensors. `config.algorithms` has their table and their options."""

from importlib import import_module

from megatron_rft.config.algorithms import ALGORITHMS
from megatron_rft.config.algorithms.base import Algorithm
from megatron_rft.config.algorithms.online import DEFAULT, Setting
from megatron_rft.objectives.base import Objective


def build(options: Algorithm, setting: Setting = DEFAULT) -> Objective:
    """Build the objective of a section."""
    name = options.name  # pyright: ignore[reportAttributeAccessIssue]  # every section of the table has its own
    _, objective = ALGORITHMS[name]
    assert objective is not None, f"{name}: the user's file has its objective"
    module, _, kind = objective.rpartition(".")
    return getattr(import_module(f"{__name__}.{module}"), kind)(options, setting)
