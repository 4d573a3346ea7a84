"""megatron-core's check of shards within one pipeline stage: one rank writes each."""

import pytest
import torch
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from megatron_rft.rehearsal.saving import check_written_once

LAYERS, FIRST = 8, 4  # of the model, and of a stage of two


def shard(layer, part, replica=0):
    """A matrix of a layer that is cut in two."""
    offsets = (0, FIRST + layer, LAYERS), (1, part, 2)
    return ShardedTensor.from_rank_offsets(
        "layers.weight", torch.empty(3, 5), *offsets, replica_id=(0, 0, replica), prepend_axis_num=1
    )


def test_two_layers_over_two_ranks():
    check_written_once([(part, shard(layer, part)) for layer in range(2) for part in range(2)])


@pytest.mark.parametrize(
    "wrong",
    [
        [(0, shard(0, 0)), (1, shard(0, 1)), (0, shard(1, 0))],  # nobody writes the last part
        [(0, shard(0, 0)), (1, shard(0, 0)), (1, shard(0, 1))],  # two ranks write the first part
        [(0, shard(0, 0)), (1, shard(0, 1, replica=1))],  # the second part is only a copy
    ],
)
def test_a_shard_that_nobody_or_two_ranks_write(wrong):
    with pytest.raises(CheckpointingException, match="Invalid access pattern"):
        check_written_once(wrong)
