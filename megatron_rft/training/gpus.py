"""Assigns the GPUs of a node to engines, and engines to the ranks of the node."""

import os

import torch
import torch.distributed as dist

from megatron_rft.inference.pool import shares
from megatron_rft.utils.errors import ConfigError


def engines_of_node(count: int, rank: int, world: int) -> list[int]:
    """The indices, among `count` engines, of those that the ranks of this node drive."""
    first, ranks = rank - int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return [engine for other in range(first, first + ranks) for engine in shares(count, other, world)[0]]


def devices(number: int, workers: int, spare: list[str], own: str) -> list[str]:
    """The GPUs of engine `number` of this node: `spare` ones, or its rank's GPU `own` if there are none."""
    if not spare and workers == 1:
        return [own]
    slots = len(spare) // workers
    if not slots:
        raise ConfigError(
            f"vllm.tensor_parallel_size: a server takes {workers} GPUs, and {len(spare)} of this node's are without a "
            "rank. Start fewer ranks, or set rollout.placement=colocated: engines then share the ranks' GPUs"
        )
    first = number % slots * workers
    return spare[first : first + workers]


def nodes() -> int:
    return max(1, dist.get_world_size() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def visible_gpus() -> list[str]:
    """The visible GPUs, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]


def own_device() -> str:
    """This rank's GPU, as CUDA_VISIBLE_DEVICES names it."""
    return visible_gpus()[int(os.environ.get("LOCAL_RANK", "0"))]


def spare_gpus() -> list[str]:
    """The GPUs of this node that no rank uses."""
    return visible_gpus()[int(os.environ.get("LOCAL_WORLD_SIZE", "1")) :] if torch.cuda.is_available() else []
