"""Makes a checkpoint and an export as the run does, but writes no tensor.

The checkpoint goes through `Checkpointer.save`: sharded state, the gathering of the optimizer's state, megatron-core's
distribution of shards over data-parallel ranks, the local plan, and the copies for the writer. megatron-core's check
that one rank writes each shard needs the shards of other ranks, so this rank computes them too.
"""

import queue
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing import state_dict_utils
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.dist_checkpointing.strategies import filesystem_async, fully_parallel
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner
from megatron.core.dist_checkpointing.validation import _validate_sharding_for_key
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from torch.distributed.checkpoint.metadata import Metadata

from megatron_rft.megatron import checkpoint as checkpoints
from megatron_rft.megatron import parallel, weights
from megatron_rft.megatron.actor import Actor
from megatron_rft.megatron.lora import sharded_state
from megatron_rft.rehearsal.device import FakeDevice
from megatron_rft.rehearsal.ledger import Ledger
from megatron_rft.training.models import Models


def rehearse(ledger: Ledger, mode: FakeDevice, models: Models, distributed: bool, gathers: bool) -> None:
    """Rehearse a checkpoint and an export. `distributed`: the run has the distributed optimizer, whose state the first
    data-parallel rank gathers if the run `gathers`.

    Raises:
        CheckpointingException: no rank writes a shard, or several ranks do.
    """
    _install(distributed)
    with tempfile.TemporaryDirectory() as folder, mode.shapes_on_the_host():
        with ledger.during("checkpoint"), ledger.holding("checkpoint"):
            _save(checkpoints.Checkpointer(Path(folder), models.trained, averages=models.averages, gathers=gathers))
            check_shards(models.trained)
        if parallel.rank() == 0:  # the other ranks send their weights, as they do to an engine
            with ledger.during("export"), ledger.holding("buckets"):
                actor = models.actor
                weights.save_folder(actor.stream(), Path(folder, "export"), actor.hf_config, save=_touch)


def _touch(_: Any, path: Path, **__: Any) -> None:
    path.touch()


def _install(distributed: bool) -> None:
    """Replace functions of torch and megatron-core that need other ranks."""
    filesystem_async._results_queue = queue.Queue()
    for module in (state_dict_utils, fully_parallel):
        module.validate_sharding_integrity = lambda *_, **__: None  # check_shards does it
    MCoreSavePlanner.create_global_plan = lambda self, plans: (plans, Metadata({}))
    plain = dist.all_gather_object

    def all_gather_object(gathered: list, own: Any, group: dist.ProcessGroup | None = None) -> None:
        plain(gathered, own, group)
        if distributed and isinstance(own, list) and any(isinstance(shard, ShardedTensor) for shard in own):
            gathered[1:] = [[shard for shard in own if "optimizer.state." not in shard.key]] * (len(gathered) - 1)

    def gather_object(obj: Any, object_gather_list: list | None = None, *_: Any, **__: Any) -> None:
        if object_gather_list is not None:
            object_gather_list[:] = [obj] * len(object_gather_list)

    dist.all_gather_object, dist.gather_object = all_gather_object, gather_object


def _save(checkpointer: checkpoints.Checkpointer) -> None:
    """Save up to the start of the writer, which gets copies in host memory."""
    checkpointer.queue.schedule_async_request = lambda request: request.preload_fn and request.preload_fn()
    checkpointer.save(1, {}, {})


def check_shards(models: dict[str, Actor]) -> None:
    """Check that one rank writes each shard of this pipeline stage's weights; the optimizer's state is cut like them.
    It computes the shards of every rank of the stage that may write.

    Raises:
        CheckpointingException: no rank writes a shard, or several ranks do.
    """
    shards: dict[str, list[tuple[int, ShardedTensor]]] = defaultdict(list)
    metadata = ensure_metadata_has_dp_cp_group(dict(checkpoints.METADATA))
    for number in range(max(parallel.tp_size(), parallel.etp_size() * parallel.ep_size())):
        with _as_rank(dist.get_rank() + number):
            for name, actor in models.items():
                for chunk in actor.models:
                    part = sharded_state(chunk, f"{name}.", metadata)
                    apply_factories(part)
                    for shard in nested_values(part):
                        if isinstance(shard, ShardedTensor):
                            shards[shard.key].append((number, shard))
    for of_tensor in shards.values():
        copy = parallel.pp_rank() > 0 and all(shard.replica_id[0] > 0 for _, shard in of_tensor)
        if not copy:  # an embedding that is also the last stage's output matrix: the first stage writes it
            check_written_once(of_tensor)


def check_written_once(shards: list[tuple[int, ShardedTensor]]) -> None:
    """megatron-core's check of one tensor: `shards` has (rank, shard) of this stage. The layers, which are the first
    axis of a layer's tensors, are numbered within it.

    Raises:
        CheckpointingException: no rank writes a shard, or several ranks do.
    """
    if shards[0][1].prepend_axis_num:
        layers = sorted({shard.global_offset[0] for _, shard in shards})
        shards = [(rank, _at_layer(shard, layers.index(shard.global_offset[0]), len(layers))) for rank, shard in shards]
    _validate_sharding_for_key(shards)


def _at_layer(shard: ShardedTensor, number: int, layers: int) -> ShardedTensor:
    return replace(
        shard,
        global_shape=(layers, *shard.global_shape[1:]),
        global_offset=(number, *shard.global_offset[1:]),
        axis_fragmentations=(layers, *shard.axis_fragmentations[1:]),
    )


@contextmanager
def _as_rank(number: int) -> Iterator[None]:
    """Let groups answer as they do to rank `number`, which is in the same pipeline stage."""
    plain = vars(dist.ProcessGroup)["rank"]

    def rank(group: dist.ProcessGroup) -> int:
        ranks = dist.get_process_group_ranks(group)
        stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        return number // stride % len(ranks)

    dist.ProcessGroup.rank = rank
    try:
        yield
    finally:
        dist.ProcessGroup.rank = plain
