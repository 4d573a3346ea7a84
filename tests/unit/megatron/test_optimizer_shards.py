"""The optimizer's state from the files of other ranks: in any boxes, and never with zeros for what is not there."""

import pytest
import torch

from megatron_rft.megatron.optimizer_shards import NAMES, Range, ShardReader, Shards, file_of, index
from megatron_rft.utils.errors import DataError

VALUES = torch.arange(12.0).view(4, 3)  # of the whole tensor
HALVES = {0: VALUES[:2], 2: VALUES[2:]}  # by the first row
VOCABULARY = "actor.output_layer.weight"


def write(folder, rank: int, key: str, row: int, box: torch.Tensor, start: int, stop: int) -> None:
    shards = Shards()
    place = {"key": key, "offset": (row, 0), "shape": tuple(box.shape), "start": start, "stop": stop}
    shards.ranges = [{"set": "own"} | place]
    shards.values = [{name: box.reshape(-1)[start:stop].clone() for name in NAMES}]
    shards.write(file_of(folder, rank))


def read(folder, *wanted) -> list[float]:
    out = torch.zeros(wanted[-1] - wanted[-2])
    ShardReader(index(folder))._fill(out, "own", "exp_avg", Range(*wanted))
    return out.tolist()


def test_a_range_is_read_from_all_files_that_have_a_part_of_it(tmp_path):
    write(tmp_path, 0, "k", 0, VALUES, 0, 7), write(tmp_path, 1, "k", 0, VALUES, 7, 12)
    assert read(tmp_path, "k", (0, 0), (4, 3), 2, 9) == list(range(2, 9))
    assert read(tmp_path, "k", (2, 0), (2, 3), 1, 6) == list(range(7, 12)), "another layout"
    file_of(tmp_path, 1).unlink()
    for box in ((0, 0), (4, 3), 2, 5), ((2, 0), (2, 3), 1, 6):
        with pytest.raises(DataError, match="a part of the optimizer's state of k is missing"):
            read(tmp_path, "k", *box)


@pytest.mark.parametrize("key", ["k", VOCABULARY])
def test_a_box_that_is_gone_is_noticed(tmp_path, key):
    for rank, (row, half) in enumerate(HALVES.items()):
        write(tmp_path, rank, key, row, half, 0, 6)
    assert read(tmp_path, key, (0, 0), (4, 3), 0, 12) == list(range(12))
    file_of(tmp_path, 0).unlink()
    if key == VOCABULARY:  # a larger number of tensor-parallel ranks adds rows to it
        assert read(tmp_path, key, (3, 0), (2, 3), 0, 6) == [9, 10, 11, 0, 0, 0]
        key = "another"
    for box in ((0, 0), (4, 3), 0, 12), ((0, 0), (2, 3), 0, 6):
        with pytest.raises(DataError, match=f"the optimizer's state of {key} is missing, or a part of it"):
            read(tmp_path, key, *box)
