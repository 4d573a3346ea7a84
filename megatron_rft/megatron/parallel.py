"""Process groups, seeds, and who this rank is. Starts under torchrun or as a single process.

Does not choose a layout: the recipe does, and `megatron_rft.config` checks that it fits the number of ranks.
"""

import os
import random
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from megatron_rft.utils.errors import ConfigError


def initialize(megatron: Any, *, seed: int = 0, timeout: timedelta = timedelta(minutes=30)) -> None:
    """Join the other ranks and lay them out as the recipe's `megatron` section says.

    May be called again after `shutdown`, or with another layout after `forget_layout`.
    """
    if torch.cuda.is_available():
        torch.cuda.set_device(device())
    if not dist.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        # a process that no launcher started is a world of one
        alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        try:
            dist.init_process_group(backend, timeout=timeout, **alone)
        except dist.DistNetworkError as error:  # a port that is taken, or nobody there
            place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            reason = str(error).partition("\n")[0]
            raise ConfigError(
                f"MASTER_ADDR and MASTER_PORT: the ranks cannot meet at {place} ({reason}). Name an address that all "
                "nodes reach, and a port of it that is free"
            ) from None
    _check_world(megatron)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=megatron.tensor_model_parallel_size,
        pipeline_model_parallel_size=megatron.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=megatron.virtual_pipeline_model_parallel_size,
        context_parallel_size=megatron.context_parallel_size,
        expert_model_parallel_size=megatron.expert_model_parallel_size,
        expert_tensor_parallel_size=megatron.expert_tensor_parallel_size,
        distributed_timeout_minutes=max(1, round(timeout.total_seconds() / 60)),
    )
    manual_seed(seed)


def manual_seed(seed: int) -> None:
    """Seed Python, torch and, on GPUs, megatron-core's generators for tensor-parallel regions."""
    random.seed(seed)
    torch.manual_seed(seed)
    if torch.cuda.is_available():
        model_parallel_cuda_manual_seed(seed)


def forget_layout() -> None:
    """Drop the groups of the layout, with their threads and sockets; the ranks stay connected."""
    for group in parallel_state._global_process_group_list or ():
        if group is not None and group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()


def shutdown() -> None:
    """Leave. Without it gloo's threads are now and then still running at the end of the process, which then aborts."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _check_world(m: Any) -> None:
    world, dense = dist.get_world_size(), m.tensor_model_parallel_size * m.pipeline_model_parallel_size
    sizes = {
        "tensor x pipeline x context": dense * m.context_parallel_size,
        "expert x expert tensor x pipeline": m.expert_model_parallel_size
        * (m.expert_tensor_parallel_size or m.tensor_model_parallel_size)
        * m.pipeline_model_parallel_size,
    }
    for name, size in sizes.items():
        if world % size:
            raise ConfigError(f"{world} ranks cannot be divided into model-parallel groups of {size} ({name} parallel)")


def device() -> torch.device:
    """Where this rank's model lives."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device("cpu")


def rank() -> int:
    return dist.get_rank()


def world_size() -> int:
    return dist.get_world_size()


def tp_rank() -> int:
    return parallel_state.get_tensor_model_parallel_rank()


def tp_size() -> int:
    return parallel_state.get_tensor_model_parallel_world_size()


def tp_group() -> dist.ProcessGroup:
    return parallel_state.get_tensor_model_parallel_group()


def pp_rank() -> int:
    return parallel_state.get_pipeline_model_parallel_rank()


def pp_size() -> int:
    return parallel_state.get_pipeline_model_parallel_world_size()


def pp_group() -> dist.ProcessGroup:
    return parallel_state.get_pipeline_model_parallel_group()


def is_last_stage() -> bool:
    """On the last rank of the pipeline (of virtual stages too: the last of them is there)."""
    return pp_rank() == pp_size() - 1


def cp_rank() -> int:
    return parallel_state.get_context_parallel_rank()


def cp_size() -> int:
    return parallel_state.get_context_parallel_world_size()


def cp_group() -> dist.ProcessGroup:
    return parallel_state.get_context_parallel_group()


def dp_rank() -> int:
    """Among the ranks that see other data: context parallelism not counted."""
    return parallel_state.get_data_parallel_rank()


def dp_size() -> int:
    return parallel_state.get_data_parallel_world_size()


def dp_group() -> dist.ProcessGroup:
    return parallel_state.get_data_parallel_group()


def ep_rank() -> int:
    return parallel_state.get_expert_model_parallel_rank()


def ep_size() -> int:
    return parallel_state.get_expert_model_parallel_world_size()


def ep_group() -> dist.ProcessGroup:
    return parallel_state.get_expert_model_parallel_group()


def etp_rank() -> int:
    return parallel_state.get_expert_tensor_parallel_rank()


def etp_size() -> int:
    return parallel_state.get_expert_tensor_parallel_world_size()


def etp_group() -> dist.ProcessGroup:
    return parallel_state.get_expert_tensor_parallel_group()
