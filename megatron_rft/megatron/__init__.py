"""Everything that uses a process group: the model, its layout over ranks, its weights, schedules and checkpoints.

Importing this package prepares megatron-core for this host, before any part of megatron-core is used.
"""

from megatron_rft.megatron import cpu

cpu.install()
