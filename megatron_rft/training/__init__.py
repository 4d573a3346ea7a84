"""Training. Every rank of a run calls `train` with a checked recipe."""

from functools import partial

from megatron_rft.config import Recipe
from megatron_rft.launching.run_folder import claim_folder
from megatron_rft.megatron import parallel
from megatron_rft.utils.late_imports import lean_import


def train(recipe: Recipe) -> int:
    """Train, or generate trajectories, until the end or a signal; returns the exit status (training/run.py).

    Raises:
        UserError: the recipe does not fit the folder, the data or the model.
        RunFailed: the run cannot go on.
    """
    name = "online" if recipe.trainer == "rl" else recipe.trainer
    module = lean_import(f"megatron_rft.training.{name}")  # stores of trajectories need pyarrow, the others do not
    if recipe.trainer == "generate":  # its workers form no process group
        return module.run(recipe)
    parallel.initialize(recipe.megatron, seed=recipe.run.seed, faults=recipe.faults)
    try:
        parallel.on_main(partial(claim_folder, recipe))
        return module.train(recipe)
    finally:
        parallel.shutdown()
