"""What a recipe comes to on a number of ranks: layout, parameters, memory, engines. Arithmetic without torch."""

from megatron_rft.plan.checks import Plan, check, check_store_is_there, check_writable, make_folder
