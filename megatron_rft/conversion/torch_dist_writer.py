"""Writes megatron-core's distributed checkpoints (torch_dist) from a lookup, one parameter in memory at a time.

Plain files, no process group: any layout reads them. Only the cut into chunks follows a layout, because a
tensor-parallel rank reads whole chunks: with as many chunks as ranks each reads its own and nothing else.
"""

import io
import json
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_rft.conversion.mapping import LAYER, Mapping, canonical_names
from megatron_rft.conversion.shards import GATE_AND_UP, VOCABULARY, padded_vocab, partition_dim
from megatron_rft.conversion.torch_dist import CONFIG, METADATA, Place, places
from megatron_rft.utils.errors import ConfigError

# Megatron's linear layers keep a state for Transformer Engine beside their weight, and ask for it when they are loaded.
WITH_STATE = ("linear_qkv.weight", "linear_proj.weight", "linear_fc1.weight", "linear_fc2.weight")


class MegatronWriter:
    """`write` gives `folder` the tensors of `lookup`. The folder must be there, and empty; it is whole at the end."""

    def __init__(self, folder: Path, hf_config: Any, tensor_parallel: int = 1, file_bytes: int = 4 << 30):
        self.folder, self.hf_config, self.tp, self.file_bytes = folder, hf_config, tensor_parallel, file_bytes
        self.tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        self.stored: dict[MetadataIndex, _StorageInfo] = {}
        self.files = 0
        self.file: BinaryIO | None = None

    def write(self, lookup: Callable[[str], Tensor]) -> None:
        try:
            self._write(lookup)
        finally:
            if self.file is not None:  # after a failure, and to a full disk closing may fail as well
                with suppress(OSError):
                    self.file.close()

    def _write(self, lookup: Callable[[str], Tensor]) -> None:
        mapping = Mapping(self.hf_config)
        for name in canonical_names(self.hf_config):
            whole = mapping.merge(name, [lookup(hf_name) for hf_name in mapping.hf_names(name)])
            if name in VOCABULARY:
                whole = F.pad(whole, (0, 0, 0, padded_vocab(len(whole), self.tp) - len(whole)))
            for place in self._places(name):
                self._add(name, place, whole)
                if name.endswith(WITH_STATE):
                    self._add_state(place)
        self._finish()

    def _places(self, name: str) -> list[Place]:
        """Models without experts are written with all layers in one tensor, others layer by layer, as megatron-core
        does it. The norm before experts has one name with Transformer Engine and another without: it gets both."""
        experts = getattr(self.hf_config, "num_experts", 0)
        found = list(places(name, self.hf_config.num_hidden_layers, experts))
        if not LAYER.fullmatch(name):
            return found
        stacked = found[::2]
        if not experts:
            return stacked[:1]
        single = found[1::2]
        return single if "pre_mlp_layernorm" in name else single[:1]

    def _add(self, name: str, place: Place, whole: Tensor) -> None:
        size = torch.Size((*place.outer, *whole.shape))
        if place.key not in self.tensors:
            self.tensors[place.key] = TensorStorageMetadata(TensorProperties(dtype=whole.dtype), size, [])
        chunks = self.tensors[place.key].chunks
        for offset, part in self._cut(name, whole):
            chunk = ChunkStorageMetadata(
                torch.Size((*place.index, *offset)), torch.Size((*(1 for _ in place.index), *part.shape))
            )
            self._store(MetadataIndex(place.key, chunk.offsets, len(chunks)), part.reshape(chunk.sizes).clone())
            chunks.append(chunk)

    def _cut(self, name: str, whole: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """(offset, part) of a parameter over tensor-parallel ranks; gate and up, which lie end to end, are each cut."""
        dim = partition_dim(name)
        if dim is None:
            yield (0,) * whole.dim(), whole
            return
        count = self.tp * (2 if GATE_AND_UP.fullmatch(name) else 1)
        if whole.shape[dim] % count:
            raise ConfigError(f"{name} {tuple(whole.shape)} cannot be cut for {self.tp} tensor-parallel ranks")
        size = whole.shape[dim] // count
        for number, part in enumerate(whole.split(size, dim)):
            yield tuple(number * size if d == dim else 0 for d in range(whole.dim())), part

    def _add_state(self, place: Place) -> None:
        """An empty one, for each layer (and expert)."""
        key = place.key.removesuffix("weight") + "_extra_state"
        number = ".".join(map(str, place.index)) or "0"
        full = f"{key}/shard_{number}_{'.'.join(map(str, place.outer)) or '1'}"
        self.tensors[full] = BytesStorageMetadata()
        self._store(MetadataIndex(full), [None])

    def _store(self, index: MetadataIndex, data: Any) -> None:
        if self.file is None or self.file.tell() >= self.file_bytes:
            self._close()
            self.file = (self.folder / f"__0_{self.files}.distcp").open("wb")
            self.files += 1
        begin = self.file.tell()
        torch.save(data, self.file)
        name = Path(self.file.name).name
        self.stored[index] = _StorageInfo(name, begin, self.file.tell() - begin)

    def _close(self) -> None:
        if self.file is not None:
            self.file.flush()
            os.fsync(self.file.fileno())
            self.file.close()
            self.file = None

    def _finish(self) -> None:
        self._close()
        common = io.BytesIO()
        torch.save({"checkpoint_version": 3.0}, common)  # q, k and v lie by query group
        (self.folder / "common.pt").write_bytes(common.getvalue())
        versions = {"sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}
        (self.folder / CONFIG).write_text(json.dumps({"sharded_backend": "torch_dist", **versions}))
        metadata = Metadata(self.tensors, {}, self.stored, StorageMeta(), CURRENT_DCP_VERSION)
        (self.folder / METADATA).write_bytes(pickle.dumps(metadata))
