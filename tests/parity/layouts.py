"""Ends a layout, and a script that had several."""

import os

from megatron_rft.megatron import parallel
from megatron_rft.megatron.actor import Actor

MOST = 150  # threads: a layout of four ranks has about 80


def release(*actors: Actor) -> None:
    """Let go of models that are no longer needed. The dispatcher of a mixture keeps tensors of the last forward pass,
    whose graph ends in the hooks of megatron-core's wrapper, which has the model: a circle that no collection sees. The
    threads of the model's process groups would live on, and each group has one that wakes up every 10 ms."""
    for actor in actors:
        for chunk in actor.chunks:
            vars(chunk).clear()


def shutdown() -> None:
    """Disconnect the ranks, and check that the groups of earlier layouts have ended."""
    threads = len(os.listdir("/proc/self/task"))
    assert threads < MOST, f"{threads} threads: models of earlier layouts live on, with their groups"
    parallel.shutdown()
