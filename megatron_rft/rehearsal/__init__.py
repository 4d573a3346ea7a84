"""One rank of a GPU cluster runs a whole training step on a host without GPUs: `megatron-rft rehearse`.

The project's and megatron-core's own code run at full size. Tensors on "cuda" have shapes, dtypes and storages without
memory; host tensors are real; the process group is torch's "fake" backend. What the device would do is counted: memory
by category, kernels, collectives, and the host's waits for the device.

    guard     the small library that torch's autograd needs      no torch; loaded before torch
    cuda      what Python code asks of torch.cuda
    device    the dispatch mode: device operations on shapes
    ledger    what is counted
    patches   what no shape says: neighbours' messages, routing, categories of memory
    batches   a batch of the recipe's sizes
    rank      one rank's step; a process of its own              python -m megatron_rft.rehearsal.rank
    report    the counts as text                                 no torch

Nothing but commands/rehearse.py imports this package.
"""
