"""Everything that knows a process group: the model, its layout over ranks, its weights, schedules and checkpoints.

Importing this package prepares megatron-core for the host it is on, before anything of megatron-core is used.
"""

from megatron_rft.megatron import adam, cpu

cpu.install()
adam.install()
