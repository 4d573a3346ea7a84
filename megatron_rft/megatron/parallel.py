"""Initialises process groups and seeds, and returns this rank's position in them. Runs under a launcher or alone.

The recipe chooses the layout, and `megatron_rft.config` checks that it fits the number of ranks.
"""

import math
import os
import random
import resource
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from megatron_rft.config.sections import Faults
from megatron_rft.megatron.collectives import count_collectives
from megatron_rft.megatron.gloo_device import share_gloo_device
from megatron_rft.utils.device import has_cuda_device
from megatron_rft.utils.errors import ConfigError, UserError
from megatron_rft.utils.network_interface import name_for_gloo

PHASES = ("start", "generation", "checkpoint")  # phases that wait on the host, each in a gloo group with its own limit
_host_groups: dict[str, dist.ProcessGroup] = {}
_set_here: list[str] = []  # environment variables of a process that no launcher started


def initialize(megatron: Any, *, seed: int = 0, faults: Faults | None = None) -> None:
    """Connect to the other ranks and create the groups of the layout in the recipe's `megatron` section.

    May be called again after `shutdown`, or with another layout after `destroy_layout`. `faults` has the seconds that
    ranks wait for each other. On GPUs NCCL applies the limit of a step: its watchdog ends the process.

    Raises:
        ConfigError: torch does not find this rank's GPU, the ranks cannot connect, or their number does not fit the
            layout.
    """
    faults = faults or Faults()
    count_collectives()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a rank opens a connection to each other, for each group
    if megatron.tensor_model_parallel_size > 1 or megatron.context_parallel_size > 1:
        # megatron-core overlaps their communication with matrix products, and relies on the order of their launches
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if torch.cuda.is_available():
        _check_own_gpu()
        torch.cuda.set_device(device())
    elif has_cuda_device():
        raise ConfigError(
            f"this machine has an NVIDIA GPU, but torch {torch.__version__} finds none: `megatron-rft doctor` says why "
            "(CUDA_VISIBLE_DEVICES= computes on the CPU)"
        )
    else:
        share_gloo_device()
    if not dist.is_initialized():
        _connect(faults)
    _check_world(megatron)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=megatron.tensor_model_parallel_size,
        pipeline_model_parallel_size=megatron.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=megatron.virtual_pipeline_model_parallel_size,
        context_parallel_size=megatron.context_parallel_size,
        expert_model_parallel_size=megatron.expert_model_parallel_size,
        expert_tensor_parallel_size=megatron.expert_tensor_parallel_size,
        distributed_timeout_minutes=max(1, math.ceil(faults.step_limit_s / 60)),
    )
    manual_seed(seed)


def _check_own_gpu() -> None:
    """Check that this process sees the GPU of its local rank. Slurm can hide those of other tasks, but a rank also
    uses the others: for engines, and to share memory with them."""
    local, visible = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if local >= visible:
        raise ConfigError(
            f"rank {local} of this node finds no GPU: of {os.environ.get('LOCAL_WORLD_SIZE', 'several')} ranks here it "
            f"sees {visible} GPU(s). A node needs one for each rank, and each rank must see all of them: use "
            "--gpus-per-node, without --gpus-per-task and --gpu-bind"
        )


def _connect(faults: Faults) -> None:
    """Create the group of all ranks, and the groups in which they wait on the host."""
    alone = {}
    if "RANK" not in os.environ:
        _set_single_rank_environment()
        alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    elif os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):
        name_for_gloo(os.environ.get("MASTER_ADDR", ""))
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=faults.start_limit_s), **alone)
    except dist.DistNetworkError as error:  # the port is taken, or no rank answers
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"MASTER_ADDR and MASTER_PORT: the ranks cannot meet at {address} ({reason}). Name an address that all "
            "nodes reach, and a port of it that is free"
        ) from None
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=faults.step_limit_s))
    for phase in PHASES:
        limit = timedelta(seconds=getattr(faults, f"{phase}_limit_s"))
        _host_groups[phase] = dist.new_group(backend="gloo", timeout=limit)


def _set_single_rank_environment() -> None:
    """Set the variables of a launcher for a single rank. vLLM's external_launcher reads them too."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    for name, value in (alone | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}).items():
        if name not in os.environ:
            os.environ[name] = value
            _set_here.append(name)


def host_group(phase: str) -> dist.ProcessGroup:
    """Return the gloo group of all ranks with the limit of `phase`, one of PHASES, for waits longer than a step."""
    return _host_groups[phase]


def barrier(phase: str) -> None:
    """Wait for all ranks, with the time limit of `phase`."""
    dist.barrier(group=_host_groups[phase])


def from_all_ranks(item: Any, phase: str) -> list[Any]:
    """Return the items of all ranks, in rank order, on every rank, with the time limit of `phase`."""
    items = [None] * dist.get_world_size()
    dist.all_gather_object(items, item, group=host_group(phase))
    return items


def on_main(action: Callable[[], Any]) -> Any:
    """Run `action` on rank 0 only, and return its result on every rank. A UserError there is raised on every rank, so
    no rank waits for another."""
    outcome: list[Any] = [None, None]  # the result, the error
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except UserError as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, group=host_group("start"))
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def manual_seed(seed: int) -> None:
    """Seed Python, torch and, on GPUs, megatron-core's generators for tensor-parallel regions."""
    random.seed(seed)
    torch.manual_seed(seed)
    if torch.cuda.is_available():
        model_parallel_cuda_manual_seed(seed)


def destroy_layout() -> None:
    """Destroy the groups of the layout, with their threads and sockets; the ranks stay connected."""
    for group in parallel_state._global_process_group_list or ():
        if group is not None and group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()


def shutdown() -> None:
    """Destroy all groups. Otherwise gloo's threads may still run when the process ends, which then aborts."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        _host_groups.clear()
    while _set_here:
        os.environ.pop(_set_here.pop(), None)


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
    """Return the device of this rank's model."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device("cpu")


rank = dist.get_rank
tp_rank = parallel_state.get_tensor_model_parallel_rank
tp_size = parallel_state.get_tensor_model_parallel_world_size
tp_group = parallel_state.get_tensor_model_parallel_group
pp_rank = parallel_state.get_pipeline_model_parallel_rank
pp_size = parallel_state.get_pipeline_model_parallel_world_size
pp_group = parallel_state.get_pipeline_model_parallel_group
cp_rank = parallel_state.get_context_parallel_rank
cp_size = parallel_state.get_context_parallel_world_size
cp_group = parallel_state.get_context_parallel_group
dp_rank = parallel_state.get_data_parallel_rank  # among the ranks with different data; context-parallel ranks share it
dp_size = parallel_state.get_data_parallel_world_size
dp_group = parallel_state.get_data_parallel_group
ep_rank = parallel_state.get_expert_model_parallel_rank
ep_size = parallel_state.get_expert_model_parallel_world_size
ep_group = parallel_state.get_expert_model_parallel_group
etp_rank = parallel_state.get_expert_tensor_parallel_rank
etp_size = parallel_state.get_expert_tensor_parallel_world_size
etp_group = parallel_state.get_expert_tensor_parallel_group


def dp_with_cp_group() -> dist.ProcessGroup:
    """Return the group of ranks with the same weights: data parallel and context parallel."""
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def is_last_stage() -> bool:
    """Return whether this rank is the last of the pipeline, which also has the last virtual stage."""
    return pp_rank() == pp_size() - 1
