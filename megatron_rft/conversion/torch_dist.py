"""Reads megatron-core's distributed checkpoints (torch_dist) from their files, without a process group.

A parameter is stored unsharded under one key, split into chunks in any way. So a checkpoint is read in the same way
whatever tensor, pipeline and expert parallel layout wrote it.

    decoder.layers.mlp.linear_fc2.weight       [L, H, I]: the layers of a dense model along the first dimension
    decoder.layers.3.mlp.linear_fc2.weight     [H, I]: layer by layer, as models with experts are written
    ...mlp.experts.experts.linear_fc2.weight   [E, H, I] (or [L, E, H, I])

Optimizer states are not read. A `.metadata` file is a pickle: `Unpickler` allows only the classes of such files.
Tensors are loaded with `weights_only=True`.
"""

import io
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, EnumType
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_rft.config.lora import Lora
from megatron_rft.conversion import lora
from megatron_rft.conversion.mapping import LAYER, VOCABULARY, Mapping
from megatron_rft.families.checks import raise_on_problems
from megatron_rft.families.shapes import canonical_shapes, experts
from megatron_rft.families.towers import TOWER
from megatron_rft.utils.errors import DataError

METADATA, CONFIG = ".metadata", "metadata.json"
MODEL = ("embedding.", "decoder.", "output_layer.", TOWER)
FIRST = "embedding.word_embeddings.weight"
# Transformer Engine fuses a norm into the linear layer after it; megatron-core stores the norm under that layer's name.
INTO = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_", "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}


@dataclass(frozen=True)
class Location:
    """Where a parameter is stored: at `index` of the tensor `key`. `outer`: the shape of the indexed dimensions."""

    key: str
    index: tuple[int, ...] = ()
    outer: tuple[int, ...] = ()


def locations(name: str, layers: int, experts: int) -> Iterator[Location]:
    """Yield the possible locations of the parameter with this canonical name, in the order of preference."""
    in_layer = LAYER.fullmatch(name)
    if not in_layer:
        yield Location(name)
        return
    number, expert, part = in_layer.groups()
    part, index, outer = (f"mlp.experts.experts.{part}", (int(expert),), (experts,)) if expert else (part, (), ())
    fused = next((part.replace(norm, key) for norm, key in INTO.items() if part.startswith(norm)), None)
    for key in filter(None, (fused, part)):
        yield Location(f"decoder.layers.{key}", (int(number), *index), (layers, *outer))
        yield Location(f"decoder.layers.{number}.{key}", index, outer)


class Unpickler(pickle.Unpickler):
    """Reads `.metadata` files. Raises DataError for any class outside the lists, so that no file can run code."""

    MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.planner")
    OTHERS = (
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
        ("pathlib", "Path"),
        ("pathlib", "PosixPath"),
        ("collections", "OrderedDict"),
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return member
        known = (module, name) in self.OTHERS or (module in self.MODULES and "." not in name)
        if known or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise DataError(f"it contains {module}.{name}, which no checkpoint needs")


def member(kind: Any, name: str) -> Enum:
    """Return a member of an enumeration, which Python up to 3.11.3 pickles as getattr(kind, name)."""
    if not isinstance(kind, EnumType) or name not in kind.__members__:
        raise DataError(f"it asks for {name} of {kind}, which no checkpoint needs")
    return kind[name]


def read_metadata(folder: Path) -> Metadata:
    """Read the metadata of a torch_dist folder. Raises DataError if it is missing, damaged or of another kind."""
    if not (folder / METADATA).is_file():
        what = "is incomplete" if (folder / CONFIG).is_file() or list(folder.glob("*.distcp")) else "is no checkpoint"
        raise DataError(f"{folder} {what}: it has no {METADATA}, which megatron-core writes last")
    try:
        with (folder / METADATA).open("rb") as file:
            metadata = Unpickler(file).load()
    except DataError as error:
        raise DataError(f"{folder / METADATA} is refused: {error}") from None
    except Exception as error:
        raise DataError(f"{folder / METADATA} cannot be read: {type(error).__name__}: {error}") from None
    if not isinstance(metadata, Metadata):
        raise DataError(f"{folder / METADATA} is a {type(metadata).__name__}, not the metadata of a checkpoint")
    return metadata


class MegatronFolder:
    """The tensors of a torch_dist checkpoint by HF name, like `HFFolder`: `folder(name)` reads one.

    The constructor raises DataError, naming the parameters, if one is missing, has another shape than `hf_config` says,
    is not the model's, or if a file is incomplete. Parameters may have the prefix "actor.", as in checkpoints of a
    training run; those of Megatron-LM have none.
    """

    def __init__(self, path: str | Path, hf_config: Any):
        self.path, self.hf_config = Path(path), hf_config
        self.mapping = Mapping(hf_config)
        metadata = read_metadata(self.path)
        tensors = {k: v for k, v in metadata.state_dict_metadata.items() if isinstance(v, TensorStorageMetadata)}
        self.prefix = self._find_prefix(tensors)
        ours = tuple(self.prefix + part for part in MODEL)
        self.tensors = {key.removeprefix(self.prefix): v for key, v in tensors.items() if key.startswith(ours)}
        self.stored: dict[MetadataIndex, Any] = metadata.storage_data
        self._check()
        self._parameter = lru_cache(maxsize=1)(self._read)  # q, k and v of one parameter are read one after the other

    def _find_prefix(self, tensors: dict[str, Any]) -> str:
        own = [key for key in tensors if key.endswith(FIRST) and not key.startswith("optimizer")]
        prefixes = [key.removesuffix(FIRST) for key in own]
        for prefix in ("", "actor."):
            if prefix in prefixes:
                return prefix
        if any(".adapter." in key for key in tensors):
            raise DataError(f"{self.path} has adapters alone: leave it in its run's folder, which names their model")
        names = ", ".join(each.removesuffix(".") for each in prefixes) or "none"
        raise DataError(f"{self.path}: no language model is in this checkpoint (no {FIRST}). Models in it: {names}")

    # ---- checking

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each unsharded parameter by its canonical name."""
        return canonical_shapes(self.hf_config)

    def _check(self) -> None:
        # HF name -> (canonical name, index among that parameter's parts), several of stacked experts
        self.parts: dict[str, list[tuple[str, int]]] = {}
        self.locations: dict[str, Location] = {}  # by canonical name
        missing, misshapen, used = [], [], set()
        count = experts(self.hf_config)
        for name, shape in self._shapes().items():
            possible = list(locations(name, self.hf_config.num_hidden_layers, count))
            used |= {each.key for each in possible}
            location = next((each for each in possible if each.key in self.tensors), None)
            if location is None:
                missing.append(name)
                continue
            size, expected = tuple(self.tensors[location.key].size), (*location.outer, *shape)
            padded = name in VOCABULARY and size[0] >= expected[0] and size[1:] == expected[1:]
            if size != expected and not padded:
                misshapen.append(f"{location.key} {size}, config.json says {expected}")
            self.locations[name] = location
            for i, hf_name in enumerate(self.mapping.hf_names(name)):
                self.parts.setdefault(hf_name, []).append((name, i))
        problems = {
            "missing": missing,
            "unexpected": [key for key in self.tensors if key not in used],
            "of another shape": list(dict.fromkeys(misshapen)),
            "incomplete": list(self._incomplete()),
        }
        raise_on_problems(self.path, self.hf_config, problems)

    def _incomplete(self) -> Iterator[str]:
        """Yield tensors with a missing chunk, a missing file or a truncated file."""
        sizes = {file.name: file.stat().st_size for file in self.path.glob("*.distcp")}
        for key, tensor in self.tensors.items():
            chunks = {MetadataIndex(self.prefix + key, chunk.offsets): chunk.sizes for chunk in tensor.chunks}
            stored = {index: self.stored[index] for index in chunks if index in self.stored}
            if sum(chunks[index].numel() for index in stored) < tensor.size.numel():
                yield f"{key} (chunks of it are missing)"
            for info in stored.values():
                if sizes.get(info.relative_path, 0) < info.offset + info.length:
                    what = "cut off" if info.relative_path in sizes else "not there"
                    yield f"{key} (the file {info.relative_path} is {what})"
                    break

    # ---- reading

    def __call__(self, name: str) -> Tensor:
        found = [self.mapping.split(key, self._parameter(key))[part] for key, part in self.parts[name]]
        return found[0] if self.mapping.stacked_expert(self.parts[name][0][0]) is None else torch.stack(found)

    def _read(self, name: str) -> Tensor:
        """Read a parameter from the chunks that overlap with it."""
        location = self.locations[name]
        tensor, index = self.tensors[location.key], location.index
        size = tensor.size[len(index) :]
        start, shape = (*index, *(0 for _ in size)), (*(1 for _ in index), *size)
        out = torch.empty(shape, dtype=tensor.properties.dtype)
        wanted = ChunkStorageMetadata(torch.Size(start), torch.Size(shape))
        for item in create_read_items_for_chunk_list(self.prefix + location.key, tensor, [wanted]):
            data = self._chunk(self.stored[item.storage_index])
            overlap = narrow_tensor_by_index(data, item.storage_offsets, item.lengths)
            narrow_tensor_by_index(out, item.dest_offsets, item.lengths).copy_(overlap)
        whole = out[(0,) * len(index)]
        return whole[: self.hf_config.vocab_size] if name in VOCABULARY else whole

    def _chunk(self, info: Any) -> Tensor:
        with (self.path / info.relative_path).open("rb") as file:
            file.seek(info.offset)
            return torch.load(io.BytesIO(file.read(info.length)), map_location="cpu", weights_only=True)


class AdapterCheckpoint(MegatronFolder):
    """The policy's adapters in a run's checkpoint, by HF name."""

    def __init__(self, path: Path, hf_config: Any, options: Lora):
        self.options = options
        super().__init__(path, hf_config)

    def _find_prefix(self, tensors: dict[str, Any]) -> str:
        return "actor."

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        adapters, shapes = lora.shapes(self.hf_config, self.options), {}
        weights = (name for name in canonical_shapes(self.hf_config) if name.endswith(".weight"))
        for name in (f"{weight.removesuffix('.weight')}.adapter.{part}" for weight in weights for part in "ab"):
            parts = [adapters[hf_name] for hf_name in self.mapping.hf_names(name) if hf_name in adapters]
            if parts:
                shapes[name] = (sum(part[0] for part in parts), parts[0][1])
        return shapes
