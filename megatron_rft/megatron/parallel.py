"""Initialises process groups and seeds, and returns this rank's position in them. Runs under a launcher or alone.

The recipe chooses the layout, and `megatron_rft.config` checks that it fits the number of ranks.
"""

import contextlib
import functools
import gc
import math
import os
import random
import resource
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.embeddings import RotaryEmbedding, YarnRotaryEmbedding
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from megatron_rft.config.sections import Faults
from megatron_rft.utils.device import has_cuda_device
from megatron_rft.utils.errors import ConfigError, UserError
from megatron_rft.utils.network_interface import name_for_gloo
from megatron_rft.utils.position import here, shortened
from megatron_rft.utils.processes import reserved_port

OPERATIONS = {  # by the methods of ProcessGroup
    **{name: name for name in ("broadcast", "reduce", "gather", "scatter", "barrier", "send", "recv")},
    **dict.fromkeys(("allreduce", "allreduce_coalesced"), "all_reduce"),
    **dict.fromkeys(("allgather", "_allgather_base", "allgather_into_tensor_coalesced"), "all_gather"),
    **dict.fromkeys(("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"), "reduce_scatter"),
    **dict.fromkeys(("alltoall", "alltoall_base"), "all_to_all"),
}
SIZES = (  # of the groups, by the names that a recipe and megatron-core give them
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)


@functools.cache
def count_collectives() -> None:
    """Count this rank's collectives by process group, for `utils/position.py`.

    Every operation of torch.distributed goes through a method of ProcessGroup, so that counting there sees them all.
    Messages between two ranks are counted by sender and receiver: a receiver with a higher number than its sender waits
    for it.
    """
    for method, operation in OPERATIONS.items():
        setattr(dist.ProcessGroup, method, _counted(getattr(dist.ProcessGroup, method), operation))
    dist.Work.wait = _waiting(dist.Work.wait)


def _counted(method: Callable, operation: str) -> Callable:
    @functools.wraps(method)
    def call(group, *args, **kwargs):
        key, ends = group.group_name, ()
        if operation in ("send", "recv"):  # of tensors, the other rank, and a tag
            ends = (group.rank(), args[1]) if operation == "send" else (args[1], group.rank())
            key = f"{key}:{ends[0]}>{ends[1]}"
        if not here.knows(key):
            _add_group(group, key, ends)
        if here.knows(key):
            here.collective(key, operation)
        return method(group, *args, **kwargs)

    return call


def _add_group(group: dist.ProcessGroup, key: str, ends: tuple[int, ...]) -> None:
    known = dist.distributed_c10d._world.pg_group_ranks.get(group, {})
    if not (ranks := sorted(known, key=known.__getitem__)):  # torch.distributed does not know it: an engine's
        return
    label = (group.group_desc or "").removesuffix("_GROUP").lower().replace("undefined", "")
    name = f"{key} {label}".strip()
    if ends:
        ranks = [ranks[end] for end in ends]
        name = f"{group.group_name} from {ranks[0]} to {ranks[1]}"
    here.add_group(key, name, shortened(ranks))


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


@functools.cache
def share_devices() -> None:
    """Let gloo's groups use the devices of this process's first one: a device has a thread that wakes up every 10 ms,
    and megatron-core creates twenty groups."""
    create = dist.ProcessGroupGloo.__init__

    def init(self: dist.ProcessGroupGloo, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        if devices := _devices.get(os.getpid()):
            options = self._Options()
            options._devices, options._timeout, options._threads = devices, timeout, 2 * len(devices)
            return create(self, store, rank, size, options)
        create(self, store, rank, size, timeout=timeout)
        _devices[os.getpid()] = self.options._devices

    dist.ProcessGroupGloo.__init__ = init


PHASES = ("start", "generation", "checkpoint")  # phases that wait on the host in gloo's group, each with its own limit
_host: dict[str, Any] = {}  # the group, and the limits of the phases
_devices: dict[int, list[Any]] = {}  # gloo's, by process: a fork does not have their threads
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
    if not dist.is_initialized():
        _connect(faults)
    parallel_state.initialize_model_parallel(
        **{name: getattr(megatron, name) for name in SIZES},
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
    elif several := os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):
        name_for_gloo(os.environ.get("MASTER_ADDR", ""))
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    share_devices()
    try:
        own = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # of torchrun
        if not alone and not own and "MASTER_PORT" in os.environ:
            alone = _meeting(several, faults.start_limit_s)
        dist.init_process_group(backend, timeout=timedelta(seconds=faults.start_limit_s), **alone)
    except dist.DistNetworkError as error:  # the port is taken, or no rank answers
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"MASTER_ADDR and MASTER_PORT: the ranks cannot meet at {address} ({reason}). Name an address that all "
            "nodes reach, and a port of it that is free"
        ) from None
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=faults.step_limit_s))
    _host["limits"] = {phase: timedelta(seconds=getattr(faults, f"{phase}_limit_s")) for phase in PHASES}
    _host["limits"]["failure"] = timedelta(seconds=30)  # for ranks to meet that all end by an error
    # One group for all phases: each is a mesh of connections, whose look-ups take minutes at 1,024 ranks.
    _host["group"] = dist.new_group(backend="gloo", timeout=_host["limits"]["start"])


def _meeting(several_nodes: bool, timeout_s: float) -> dict[str, Any]:
    """Open the store through which the ranks connect, and return the arguments for it. torch's would listen on all
    interfaces; this one on MASTER_ADDR alone, unless rank 0's own node does not have that address, or only as a
    loopback address, which no other node reaches."""
    rank, world, name, port = (os.environ[each] for each in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    descriptor = _listen(name, int(port), several_nodes) if rank == "0" else None
    listening = {} if descriptor is None else {"master_listen_fd": descriptor}
    limit = timedelta(seconds=timeout_s)
    store = dist.TCPStore(name, int(port), int(world), rank == "0", limit, wait_for_workers=False, **listening)
    return {"store": store, "rank": int(rank), "world_size": int(world)}


def _listen(name: str, port: int, several_nodes: bool) -> int | None:
    """Return the descriptor of a listening socket; None: torch is to listen itself."""
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(name)
        if not (several_nodes and address.startswith("127.")):
            return socket.create_server((address, port)).detach()
    return None


def _set_single_rank_environment() -> None:
    """Set the variables of a launcher for a single rank. vLLM's external_launcher reads them too."""
    with reserved_port() as probe:
        port = probe.getsockname()[1]
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    for name, value in (alone | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}).items():
        if name not in os.environ:
            os.environ[name] = value
            _set_here.append(name)


def host_group(phase: str) -> dist.ProcessGroup:
    """Return the gloo group of all ranks, for waits longer than a step. Its next collectives have the limit of `phase`,
    one of PHASES. Only the main thread may use it. Where a caller connected the ranks, it is that group."""
    if not _host:
        return dist.group.WORLD
    dist.distributed_c10d._set_pg_timeout(_host["limits"][phase], _host["group"])
    return _host["group"]


def barrier(phase: str) -> None:
    """Wait for all ranks, with the time limit of `phase`."""
    dist.barrier(group=host_group(phase))


def from_all_ranks(item: Any, phase: str) -> list[Any]:
    """Return the items of all ranks, in rank order, on every rank, with the time limit of `phase`."""
    items = [None] * dist.get_world_size()
    dist.all_gather_object(items, item, group=host_group(phase))
    return items


def gather(items: list) -> list:
    """Return the items of all ranks' lists, in rank order, on every rank. The time limit is that of generation."""
    return [item for part in from_all_ranks(items, "generation") for item in part]


def gather_on_main(items: list) -> list:
    """Return the same on rank 0 alone; elsewhere the rank's own items."""
    parts = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(items, parts, group=host_group("generation"))
    return items if parts is None else [item for part in parts for item in part]


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
    """Destroy the groups of the layout, with their threads and sockets; the ranks stay connected. A model of the layout
    that still lives keeps its groups."""
    for group in parallel_state._global_process_group_list or ():
        if group is not None and group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    _forget_layout()
    gc.collect()  # what a model that is gone holds in cycles


def _forget_layout() -> None:
    """megatron-core keeps some groups of a layout that it destroys, and their threads with them: in variables, and in
    the caches of rotary tables, whose keys are the modules."""
    parallel_state.destroy_model_parallel()
    for name, value in vars(parallel_state).items():
        if isinstance(value, dist.ProcessGroup):
            setattr(parallel_state, name, None)
    parallel_state._HYBRID_DP_CP_GROUPS.clear()
    RotaryEmbedding.forward.cache_clear()
    YarnRotaryEmbedding.forward.cache_clear()


def shutdown() -> None:
    """Destroy all groups. Otherwise gloo's threads may still run when the process ends, which then aborts."""
    if dist.is_initialized():
        _forget_layout()
        dist.destroy_process_group()
        _host.clear(), _devices.clear()
    while _set_here:
        os.environ.pop(_set_here.pop(), None)


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
# of the ranks with the same weights: data parallel and context parallel
dp_with_cp_group = functools.partial(dp_group, with_context_parallel=True)
ep_rank = parallel_state.get_expert_model_parallel_rank
ep_size = parallel_state.get_expert_model_parallel_world_size
ep_group = parallel_state.get_expert_model_parallel_group
etp_rank = parallel_state.get_expert_tensor_parallel_rank
etp_size = parallel_state.get_expert_tensor_parallel_world_size
etp_group = parallel_state.get_expert_tensor_parallel_group


def is_last_stage() -> bool:
    """Return whether this rank is the last of the pipeline, which also has the last virtual stage."""
    return pp_rank() == pp_size() - 1
