"""The reference's hidden states: what was written comes back bit for bit, and torn files are refused."""

import pytest
import torch

from megatron_rft.data.hidden_states import HiddenCache, write
from megatron_rft.utils.errors import DataError


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_any_rows_in_any_order(tmp_path, dtype):
    hidden = torch.randn(13, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    for number, part in enumerate(hidden.split((5, 1, 7))):
        write(tmp_path, number, part)
    cache = HiddenCache(tmp_path)
    for places in (torch.arange(13), torch.tensor([12, 0, 5, 5, 4, 6]), torch.tensor([], dtype=torch.long)):
        assert torch.equal(cache.rows(places), hidden[places])


def test_none_and_torn_files(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        HiddenCache(tmp_path)
    write(tmp_path, 0, torch.zeros(3, 6))
    path = tmp_path / "hidden_000000.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="cannot be read"):
        HiddenCache(tmp_path)
