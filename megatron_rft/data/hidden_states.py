"""A reference model's final hidden states at every response token of a data set, in files of a run.

    FOLDER/hidden_000000.safetensors   "hidden" [n, H]: consecutive tokens, in the order of the data set

They give the reference's logits, hidden W^T, exactly up to their dtype, in H numbers per token instead of V.
"""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_rft.utils.errors import DataError
from megatron_rft.utils.files import replacing


def write(folder: Path, number: int, hidden: Tensor) -> None:
    """Write file `number`: [n, H] of the next n tokens."""
    with replacing(folder / f"hidden_{number:06d}.safetensors") as new:
        save_file({"hidden": hidden.contiguous()}, new)


class HiddenCache:
    """The files in `folder`, which are mapped, not read. Raises DataError if there are none, or one is torn."""

    def __init__(self, folder: Path):
        try:
            self.shards = [load_file(path)["hidden"] for path in sorted(folder.glob("hidden_*.safetensors"))]
            lengths = torch.tensor([len(shard) for shard in self.shards])
            self.hidden, self.dtype = self.shards[0].shape[1], self.shards[0].dtype
        except (SafetensorError, OSError, LookupError) as error:
            raise DataError(f"the reference's hidden states in {folder} cannot be read: {error}") from None
        self.starts = lengths.cumsum(0) - lengths

    def rows(self, places: Tensor) -> Tensor:
        """[n] indices of tokens in the data set -> [n, H]"""
        out = torch.empty(len(places), self.hidden, dtype=self.dtype)
        shard = torch.bucketize(places, self.starts, right=True) - 1
        for number in shard.unique():
            chosen = shard == number
            out[chosen] = self.shards[number][places[chosen] - self.starts[number]]
        return out
