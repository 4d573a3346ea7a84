"""Runs a whole training step of one rank of a GPU cluster on a host without GPUs: `megatron-rft rehearse`.

The project's and megatron-core's own code run at full size. Tensors on "cuda" have shapes, dtypes and storages without
memory; host tensors are real; the process group is torch's "fake" backend. The ledger counts what the device would do:
memory by category, kernels, collectives, and the host's waits for the device.

    guard     builds the small library that torch's autograd needs    no torch; loaded before torch
    cuda      answers torch.cuda's functions
    device    the dispatch mode that runs device operations on shapes
    ledger    the counts
    patches   stands in for code that needs values or neighbours
    batches   makes a batch of the recipe's sizes
    rank      runs one rank's step in a process of its own            python -m megatron_rft.rehearsal.rank
    report    writes the counts as text                               no torch

Only commands/rehearse.py imports this package.
"""
