"""Writes megatron-core's distributed checkpoints (torch_dist) without a process group, one parameter at a time.

Ranks of any parallel layout can read them. A layer's parameter is one chunk, which each rank reads whole and cuts.

`torch.distributed.checkpoint.save` is not used: its FileSystemWriter sorts the tensors by size (with several files, or
where it sees a GPU), so that a planner could not make one parameter at a time, and it cannot limit the size of a file.
"""

import io
import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo

from megatron_rft.conversion.mapping import LAYER, Mapping
from megatron_rft.conversion.torch_dist import CONFIG, METADATA, Location, locations
from megatron_rft.families.shapes import canonical_shapes, experts
from megatron_rft.utils.files import flush

# Megatron's linear layers store a state of Transformer Engine beside the weight, and require it when they are loaded.
WITH_STATE = re.compile(r"decoder\..*\.(linear_(?!q_down|kv_down)\w+|in_proj|out_proj)\.weight")


class MegatronWriter:
    """`write` stores the tensors of a lookup in `folder`, which must exist and be empty."""

    def __init__(self, folder: Path, hf_config: Any, file_bytes: int = 4 << 30):
        self.folder, self.hf_config, self.file_bytes = folder, hf_config, file_bytes
        self.tensors: dict[str, dcp.TensorStorageMetadata | dcp.BytesStorageMetadata] = {}
        self.stored: dict[dcp.MetadataIndex, _StorageInfo] = {}
        self.mapping = Mapping(hf_config)
        self.files = 0  # that are complete

    def write(self, lookup: Callable[[str], Tensor]) -> None:
        mapping = self.mapping
        for name in canonical_shapes(self.hf_config):
            whole = mapping.merge(name, [lookup(hf_name) for hf_name in mapping.hf_names(name)])
            for location in self._locations(name):
                self._add(location, whole)
                if WITH_STATE.fullmatch(name):
                    self._add_state(location)
        self._finish()

    def _locations(self, name: str) -> list[Location]:
        """Return the locations to write a parameter to.

        Like megatron-core, store all layers of one kind in one tensor, and those of several kinds layer by layer.
        The norm before experts has one name with Transformer Engine and another without, and so has the one before
        latent attention; store them under both."""
        count = experts(self.hf_config)
        possible = list(locations(name, self.hf_config.num_hidden_layers, count))
        if not LAYER.fullmatch(name) or not (count or self.mapping.gated):
            return possible[:1]
        single = possible[1::2]
        return single if "pre_mlp_layernorm" in name or "input_layernorm" in name else single[:1]

    def _add(self, location: Location, whole: Tensor) -> None:
        key, index = location.key, location.index
        size = torch.Size((*location.outer, *whole.shape))
        if key not in self.tensors:
            self.tensors[key] = dcp.TensorStorageMetadata(dcp.TensorProperties(dtype=whole.dtype), size, [])
        chunks, shape = self.tensors[key].chunks, torch.Size((*(1 for _ in index), *whole.shape))
        chunk = dcp.ChunkStorageMetadata(torch.Size((*index, *(0 for _ in whole.shape))), shape)
        self._store(dcp.MetadataIndex(key, chunk.offsets, len(chunks)), whole.reshape(shape).clone())
        chunks.append(chunk)

    def _add_state(self, location: Location) -> None:
        """Store an empty state for Transformer Engine."""
        key = location.key.removesuffix("weight") + "_extra_state"
        number = ".".join(map(str, location.index)) or "0"
        full = f"{key}/shard_{number}_{'.'.join(map(str, location.outer)) or '1'}"
        self.tensors[full] = dcp.BytesStorageMetadata()
        self._store(dcp.MetadataIndex(full), [None])

    def _store(self, index: dcp.MetadataIndex, data: Any) -> None:
        name = f"__0_{self.files}.distcp"
        with (self.folder / name).open("ab") as file:
            begin = file.tell()
            torch.save(data, file)
            self.stored[index] = _StorageInfo(name, begin, file.tell() - begin)
            if file.tell() >= self.file_bytes:
                self.files += 1

    def _finish(self) -> None:
        for path in self.folder.iterdir():
            flush(path)
        common = io.BytesIO()
        torch.save({"checkpoint_version": 3.0}, common)  # 3.0: q, k and v are interleaved by query group
        (self.folder / "common.pt").write_bytes(common.getvalue())
        versions = {"sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}
        (self.folder / CONFIG).write_text(json.dumps({"sharded_backend": "torch_dist", **versions}))
        metadata = dcp.Metadata(self.tensors, {}, self.stored, dcp.StorageMeta(), CURRENT_DCP_VERSION)
        (self.folder / METADATA).write_bytes(pickle.dumps(metadata))
