"""Recipes: their sections, loading and validation. Imports no torch."""

from megatron_rft.config.evaluation import Evaluation
from megatron_rft.config.loading import AnyRecipe, dump, load, load_saved
from megatron_rft.config.recipe import Recipe
from megatron_rft.config.resume import difference
from megatron_rft.config.rewards import RewardOptions
from megatron_rft.config.sections import Batching, Data, Faults, Megatron, Model, Optimizer, Rollout, Source
