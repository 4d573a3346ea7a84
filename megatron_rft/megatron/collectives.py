"""Counts this rank's collectives by process group, for `utils/position.py`.

Every operation of torch.distributed goes through a method of ProcessGroup, so that counting there sees them all.
Messages between two ranks are counted by sender and receiver: a receiver with a higher number than its sender waits for
it.
"""

import functools
import time
from collections.abc import Callable

import torch.distributed as dist

from megatron_rft.utils.position import here, shortened

OPERATIONS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "gather": "gather",
    "scatter": "scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "barrier": "barrier",
}


@functools.cache
def count_collectives() -> None:
    """Wrap the methods, once."""
    for method, operation in OPERATIONS.items():
        setattr(dist.ProcessGroup, method, _counted(getattr(dist.ProcessGroup, method), operation))
    for method in ("send", "recv"):
        setattr(dist.ProcessGroup, method, _counted_message(getattr(dist.ProcessGroup, method), method))
    dist.Work.wait = _waiting(dist.Work.wait)


def _counted(method: Callable, operation: str) -> Callable:
    @functools.wraps(method)
    def call(group, *args, **kwargs):
        key = group.group_name
        if not here.knows(key) and (ranks := _ranks(group)):
            label = (group.group_desc or "").removesuffix("_GROUP").lower().replace("undefined", "")
            here.add_group(key, f"{key} {label}".strip(), shortened(ranks))
        if here.knows(key):
            here.collective(key, operation)
        return method(group, *args, **kwargs)

    return call


def _counted_message(method: Callable, name: str) -> Callable:
    @functools.wraps(method)
    def call(group, tensors, peer, tag):
        ends = (peer, group.rank()) if name == "recv" else (group.rank(), peer)
        key = f"{group.group_name}:{ends[0]}>{ends[1]}"
        if not here.knows(key) and (ranks := _ranks(group)):
            sender, receiver = (ranks[end] for end in ends)
            here.add_group(key, f"{group.group_name} from {sender} to {receiver}", f"{sender},{receiver}")
        if here.knows(key):
            here.collective(key, name)
        return method(group, tensors, peer, tag)

    return call


def _ranks(group: dist.ProcessGroup) -> list[int]:
    """The global ranks of a group; empty for one that torch.distributed does not know, such as those of an engine."""
    known = dist.distributed_c10d._world.pg_group_ranks.get(group, {})
    return sorted(known, key=known.__getitem__)


def _waiting(wait: Callable) -> Callable:
    @functools.wraps(wait)
    def call(*args, **kwargs):
        here.wait(True)
        begin = time.perf_counter()
        try:
            return wait(*args, **kwargs)
        finally:
            here.waited_s += time.perf_counter() - begin
            here.wait(False)

    return call
