"""The cache of hidden states: it returns what was written bit for bit, and refuses damaged or unsuitable files."""

import json
import os

import pytest
import torch

from megatron_rft.data.hidden_states import HiddenCache, Writer
from megatron_rft.utils.errors import DataError

FACTS = {"data": "d", "model": "m", "tokenizer": "t", "dtype": "bfloat16"}


def written(folder, dtype=torch.bfloat16, sizes=(5, 1, 7)):
    hidden = torch.randn(sum(sizes), 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight = torch.randn(11, 6, generator=torch.Generator().manual_seed(1)).to(dtype)
    writer = Writer(folder)
    for part in hidden.split(sizes):
        writer.add(part)
    writer.finish(weight, FACTS)
    return hidden, weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_any_rows_in_any_order(tmp_path, dtype):
    hidden, weight = written(tmp_path, dtype)
    cache = HiddenCache(tmp_path, FACTS)
    assert cache.index["tokens"] == 13 and cache.verify() is None
    for places in (torch.arange(13), torch.tensor([12, 0, 5, 5, 4, 6]), torch.tensor([], dtype=torch.long)):
        assert torch.equal(cache.rows(places), hidden[places])
    assert torch.equal(cache.output_weight(), weight)


@pytest.mark.parametrize("fact", FACTS)
def test_of_something_else(tmp_path, fact):
    written(tmp_path)
    with pytest.raises(DataError, match=f"was made of another {fact}: {FACTS[fact]} there, other now"):
        HiddenCache(tmp_path, FACTS | {fact: "other"})


def test_half_written(tmp_path):
    """Without an index there is no cache; the files of a killed writer are removed."""
    folder = tmp_path / "cache"
    Writer(folder).add(torch.zeros(3, 6))
    with pytest.raises(DataError, match="is no whole cache"):
        HiddenCache(folder, FACTS)
    abandoned = tmp_path / "cache.elsewhere.1.partial"
    abandoned.mkdir()
    os.utime(abandoned, (0, 0))
    hidden, _ = written(folder, sizes=(2, 2))
    assert torch.equal(HiddenCache(folder, FACTS).rows(torch.arange(4)), hidden)
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_two_runs_make_one_cache(tmp_path):
    slow = Writer(tmp_path / "cache")
    slow.partial = slow.partial.rename(tmp_path / "cache.elsewhere.2.partial")  # of another process
    hidden, weight = written(tmp_path / "cache")
    slow.add(hidden)
    slow.finish(weight, FACTS)
    assert torch.equal(HiddenCache(tmp_path / "cache", FACTS).rows(torch.arange(13)), hidden)
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(OSError, match="not empty"):
        Writer(tmp_path).finish(torch.zeros(2, 3), FACTS)
    assert (tmp_path / "model.safetensors").read_bytes() == b"weights"


def test_torn_and_changed_files(tmp_path):
    written(tmp_path)
    path = tmp_path / "hidden_000001.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    cache = HiddenCache(tmp_path, FACTS)
    assert cache.verify() == str(path)
    assert [cache.verify(rank, 4) for rank in range(4)].count(None) == 3  # ranks share the work
    path.write_bytes(content[:-1])
    with pytest.raises(DataError, match="missing or torn"):
        HiddenCache(tmp_path, FACTS)
    path.unlink()
    with pytest.raises(DataError, match="hidden_000001.safetensors is missing or torn"):
        HiddenCache(tmp_path, FACTS)
    (tmp_path / "index.json").write_text(json.dumps({"facts": FACTS})[:-4])
    with pytest.raises(DataError, match="no readable index.json"):
        HiddenCache(tmp_path, FACTS)
