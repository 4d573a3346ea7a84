"""A reference model's final hidden states at every response token of a data set, and its output matrix, on disk.

    CACHE/hidden_000000.safetensors   "hidden" [n, H]: consecutive tokens, in the order of the data set
    CACHE/output.safetensors          "weight" [V, H]
    CACHE/index.json                  written last: facts (data, model), token indices, sizes, checksums

They give the reference's logits, hidden W^T, exactly up to their dtype, in H numbers per token instead of V. Read
through a memory map. A cache is written to a temporary folder, then renamed atomically, also if several runs write
it at the same time; a cache of other data or of another model is refused.
"""

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_rft.utils.errors import DataError
from megatron_rft.utils.files import digest, read_json

INDEX, OUTPUT = "index.json", "output.safetensors"
ABANDONED = 3600.0  # seconds without a new file after which an unfinished cache counts as left by a killed run


class Writer:
    """`add` hidden states in the order of the data set, then `finish`, which renames them to the cache `folder`."""

    def __init__(self, folder: Path):
        self.folder, self.shards, self.tokens = folder, {}, 0
        self.partial = folder.with_name(f"{folder.name}.{os.uname().nodename}.{os.getpid()}.partial")
        for old in folder.parent.glob(f"{folder.name}.*.partial"):
            if old == self.partial or time.time() - old.stat().st_mtime > ABANDONED:
                shutil.rmtree(old)
        self.partial.mkdir(parents=True)

    def add(self, hidden: Tensor) -> None:
        """[n, H] of the next n tokens."""
        name = f"hidden_{len(self.shards):06d}.safetensors"
        save_file({"hidden": hidden.contiguous()}, self.partial / name)
        self.shards[name] = {"start": self.tokens, "tokens": len(hidden)} | digest(self.partial / name)
        self.tokens += len(hidden)

    def finish(self, weight: Tensor, facts: dict[str, Any]) -> None:
        """`weight` [V, H]. If another run has finished the cache first, that one stays and is checked when it is
        opened."""
        save_file({"weight": weight.contiguous()}, self.partial / OUTPUT)
        index = {
            "facts": facts,
            "tokens": self.tokens,
            "dtype": str(weight.dtype).removeprefix("torch."),
            "hidden": weight.shape[1],
            "vocabulary": weight.shape[0],
            "shards": self.shards,
            "output": digest(self.partial / OUTPUT),
        }
        (self.partial / INDEX).write_text(json.dumps(index, indent=1) + "\n")
        try:
            self.partial.replace(self.folder)
        except OSError:
            if not (self.folder / INDEX).is_file():
                raise
            shutil.rmtree(self.partial)


class HiddenCache:
    """Opens a cache of `facts`. Raises DataError if it is incomplete, corrupt or of other facts, which are named."""

    def __init__(self, folder: Path, facts: dict[str, Any]):
        self.folder = folder
        self.index = read_json(folder / INDEX)
        if self.index is None:
            problem = f"{folder} is no whole cache of hidden states: no readable {INDEX}"
            raise DataError(f"algorithm.reference_cache: {problem}")
        for name, wanted in facts.items():
            made_of = self.index["facts"].get(name)
            if made_of != wanted:
                raise DataError(
                    f"algorithm.reference_cache: {folder} was made of another {name.replace('_', ' ')}: {made_of} "
                    f"there, {wanted} now. Choose another folder, or remove it to make it again"
                )
        for name, written in self._files().items():
            path = folder / name
            if not path.is_file() or path.stat().st_size != written["bytes"]:
                raise DataError(f"algorithm.reference_cache: {path} is missing or torn: remove {folder} to remake it")
        self.dtype = getattr(torch, self.index["dtype"])
        self.starts = torch.tensor([shard["start"] for shard in self.index["shards"].values()])
        self.shards = [load_file(folder / name)["hidden"] for name in self.index["shards"]]  # mapped, not read

    def _files(self) -> dict[str, dict[str, Any]]:
        return self.index["shards"] | {OUTPUT: self.index["output"]}

    def verify(self, rank: int = 0, world: int = 1) -> str | None:
        """The first file in this rank's share whose checksum does not match the index, else None."""
        for name, written in sorted(self._files().items())[rank::world]:
            if digest(self.folder / name)["sha256"] != written["sha256"]:
                return str(self.folder / name)
        return None

    def rows(self, places: Tensor) -> Tensor:
        """[n] indices of tokens in the data set -> [n, H]"""
        out = torch.empty(len(places), self.index["hidden"], dtype=self.dtype)
        shard = torch.bucketize(places, self.starts, right=True) - 1
        for number in shard.unique():
            chosen = shard == number
            out[chosen] = self.shards[number][places[chosen] - self.starts[number]]
        return out

    def output_weight(self) -> Tensor:
        """[V, H]"""
        return load_file(self.folder / OUTPUT)["weight"]
