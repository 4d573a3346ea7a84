"""Makes a checkpoint and an export as the run does, but writes no tensor.

The checkpoint goes through `Checkpointer.save`: sharded state, the rank's part of the optimizer's state,
megatron-core's distribution of shards over data-parallel ranks, the local plan, and the copies for the writer.
megatron-core's check that one rank writes each shard needs the shards of other ranks: a run makes it.
"""

import queue
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing import state_dict_utils
from megatron.core.dist_checkpointing.strategies import filesystem_async, fully_parallel
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner
from torch.distributed.checkpoint.metadata import Metadata

from megatron_rft.megatron import checkpoint as checkpoints
from megatron_rft.megatron import parallel, weights
from megatron_rft.rehearsal.device import FakeDevice
from megatron_rft.rehearsal.ledger import Ledger
from megatron_rft.training.models import Models


def rehearse(ledger: Ledger, mode: FakeDevice, models: Models) -> None:
    """Rehearse a checkpoint and an export."""
    _install()
    with tempfile.TemporaryDirectory() as folder, mode.shapes_on_the_host():
        with ledger.during("checkpoint"), ledger.holding("checkpoint"):
            _save(checkpoints.Checkpointer(Path(folder), models.trained, averages=models.averages))
        if parallel.rank() == 0:  # the other ranks send their weights, as they do to an engine
            with ledger.during("export"), ledger.holding("buckets"):
                actor, out = models.actor, Path(folder, "export")
                weights.save_folder(actor.stream(), out, actor.hf_config, save=lambda _, path, **__: path.touch())


def _install() -> None:
    """Replace functions of torch and megatron-core that need other ranks."""
    filesystem_async._results_queue = queue.Queue()
    for module in (state_dict_utils, fully_parallel):
        module.validate_sharding_integrity = lambda *_, **__: None
    MCoreSavePlanner.create_global_plan = lambda self, plans: (plans, Metadata({}))

    def gather_object(obj: Any, object_gather_list: list | None = None, *_: Any, **__: Any) -> None:
        if object_gather_list is not None:
            object_gather_list[:] = [obj] * len(object_gather_list)

    dist.gather_object = gather_object


def _save(checkpointer: checkpoints.Checkpointer) -> None:
    """Save up to the start of the writer, which gets copies in host memory."""
    checkpointer.queue.schedule_async_request = lambda request: request.preload_fn and request.preload_fn()
    checkpointer.save(1, {}, {})
