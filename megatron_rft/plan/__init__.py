"""Computes the layout, parameters, memory and engines of a recipe on a number of ranks, without torch."""

from megatron_rft.plan.checks import Plan, check, check_store_is_there, check_writable, make_folder
