"""megatron-core's distributed checkpoints (torch_dist) as files: which tensor is where, read without a process group.

A parameter lies there whole, under one key, in chunks of any cut: a checkpoint that was written by any layout of
tensor, pipeline and expert parallel ranks is read alike, and one that is written here can be read by any.

    decoder.layers.mlp.linear_fc2.weight       [L, H, I]: the layers of a dense model along the first dimension
    decoder.layers.3.mlp.linear_fc2.weight     [H, I]: layer by layer, as models with experts are written
    ...mlp.experts.experts.linear_fc2.weight   [E, H, I] (or [L, E, H, I])

Optimizer states, which lie beside, are not read. A `.metadata` file is a pickle: it is read by an unpickler that knows
the classes of such files and nothing else, the tensors with `weights_only=True`.
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
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron_rft.conversion.folder import complain
from megatron_rft.conversion.mapping import EXPERT, LAYER, Mapping, canonical_names, hf_shapes
from megatron_rft.conversion.shards import VOCABULARY
from megatron_rft.utils.errors import DataError

METADATA, CONFIG = ".metadata", "metadata.json"
MODEL = ("embedding.", "decoder.", "output_layer.")
FIRST = "embedding.word_embeddings.weight"
# The fused layer of Transformer Engine has the norm before it: that is its place in a file, whatever wrote it.
FUSED = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


@dataclass(frozen=True)
class Place:
    """A parameter within a tensor of the file: `tensor[index]`; `outer` is the shape of the indexed dimensions."""

    key: str
    index: tuple[int, ...] = ()
    outer: tuple[int, ...] = ()


def places(name: str, layers: int, experts: int) -> Iterator[Place]:
    """Where a parameter of that canonical name may lie, in the order of preference."""
    in_layer = LAYER.fullmatch(name)
    if not in_layer:
        yield Place(name)
        return
    number, rest = int(in_layer[1]), in_layer[2]
    expert, index, outer = EXPERT.fullmatch(rest), (), ()
    if expert:
        part = expert["local_part"] or expert["grouped_part"]
        rest, index, outer = f"mlp.experts.experts.{part}", (int(expert["local"] or expert["grouped"]),), (experts,)
    fused = next((rest.replace(own, other) for own, other in FUSED.items() if rest.startswith(own)), None)
    for own in filter(None, (fused, rest)):
        yield Place(f"decoder.layers.{own}", (number, *index), (layers, *outer))
        yield Place(f"decoder.layers.{number}.{own}", index, outer)


class Unpickler(pickle.Unpickler):
    """Reads `.metadata` files; any class that does not belong there is refused, so that no file can run code."""

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
        raise DataError(f"it holds {module}.{name}, which no checkpoint needs")


def member(kind: Any, name: str) -> Enum:
    """Of an enumeration: Python up to 3.11.3 writes one as getattr(kind, name)."""
    if not isinstance(kind, EnumType) or name not in kind.__members__:
        raise DataError(f"it asks for {name} of {kind}, which no checkpoint needs")
    return kind[name]


def read_metadata(folder: Path) -> Metadata:
    """What is in a torch_dist folder, checked to be there."""
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
    """The tensors of a torch_dist checkpoint by HF name, read when asked for: `folder(name)`; as `HFFolder`.

    Checked against `hf_config` when opened: a missing parameter, one of another shape, one that this model does not
    have, or a file that is not whole is an error that names it. `model` is the name that a training run gives the
    model ("actor"); None finds it, and is no name at all in Megatron's own checkpoints.
    """

    def __init__(self, path: str | Path, hf_config: Any, model: str | None = None):
        self.path, self.hf_config = Path(path), hf_config
        self.mapping = Mapping(hf_config)
        metadata = read_metadata(self.path)
        tensors = {k: v for k, v in metadata.state_dict_metadata.items() if isinstance(v, TensorStorageMetadata)}
        self.prefix = self._find_prefix(tensors) if model is None else f"{model}."
        own = tuple(self.prefix + part for part in MODEL)
        self.tensors = {key.removeprefix(self.prefix): v for key, v in tensors.items() if key.startswith(own)}
        self.stored: dict[str, list] = {}
        for index, info in metadata.storage_data.items():
            if index.fqn.startswith(own) and index.offset is not None:
                self.stored.setdefault(index.fqn.removeprefix(self.prefix), []).append((index.offset, info))
        self.shapes = hf_shapes(hf_config)
        self._check()
        self._whole = lru_cache(maxsize=1)(self._read)  # q, k and v come one after the other

    def _find_prefix(self, tensors: dict[str, Any]) -> str:
        found = [key.removesuffix(FIRST) for key in tensors if key.endswith(FIRST) and not key.startswith("optimizer")]
        for prefix in ("", "actor."):
            if prefix in found:
                return prefix
        names = ", ".join(each.removesuffix(".") for each in found) or "none"
        raise DataError(f"{self.path}: no language model is in this checkpoint (no {FIRST}). Models in it: {names}")

    # ---- what is there

    def _check(self) -> None:
        self.place: dict[str, tuple[str, int]] = {}  # HF name -> its parameter, and its number among that one's parts
        self.lies: dict[str, Place] = {}
        missing, misshapen, used = [], [], set()
        for name in canonical_names(self.hf_config):
            possible = list(places(name, self.hf_config.num_hidden_layers, getattr(self.hf_config, "num_experts", 0)))
            used |= {each.key for each in possible}
            place = next((each for each in possible if each.key in self.tensors), None)
            if place is None:
                missing.append(name)
                continue
            found, wanted = tuple(self.tensors[place.key].size), (*place.outer, *self._shape(name))
            padded = name in VOCABULARY and found[0] >= wanted[0] and found[1:] == wanted[1:]
            if found != wanted and not padded:
                misshapen.append(f"{place.key} {found}, config.json says {wanted}")
            self.lies[name] = place
            self.place |= {hf_name: (name, i) for i, hf_name in enumerate(self.mapping.hf_names(name))}
        problems = {
            "missing": missing,
            "unexpected": [key for key in self.tensors if key not in used],
            "of another shape": list(dict.fromkeys(misshapen)),
            "incomplete": list(self._incomplete()),
        }
        complain(self.path, self.hf_config, problems)

    def _shape(self, name: str) -> tuple[int, ...]:
        """Of the whole parameter: its parts lie one after the other."""
        parts = [self.shapes[hf_name] for hf_name in self.mapping.hf_names(name)]
        return (sum(part[0] for part in parts), *parts[0][1:])

    def _incomplete(self) -> Iterator[str]:
        """Tensors of which a chunk is missing, or the file that holds it, or the end of that file."""
        sizes = {file.name: file.stat().st_size for file in self.path.glob("*.distcp")}
        for key, tensor in self.tensors.items():
            held = {tuple(offset): info for offset, info in self.stored.get(key, ())}
            chunks = [chunk for chunk in tensor.chunks if tuple(chunk.offsets) in held]
            if sum(chunk.sizes.numel() for chunk in chunks) < tensor.size.numel():
                yield f"{key} (chunks of it are nowhere)"
            for info in held.values():
                if info.relative_path not in sizes:
                    yield f"{key} (the file {info.relative_path} is not there)"
                    break
                if sizes[info.relative_path] < info.offset + info.length:
                    yield f"{key} (the file {info.relative_path} is cut off)"
                    break

    # ---- reading

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def __call__(self, name: str) -> Tensor:
        whole, number = self.place[name]
        return self.mapping.split(whole, self._whole(whole))[number]

    def _read(self, name: str) -> Tensor:
        """The whole parameter, of the chunks that touch it."""
        place = self.lies[name]
        tensor = self.tensors[place.key]
        start = (*place.index, *(0 for _ in tensor.size[len(place.index) :]))
        stop = (*(i + 1 for i in place.index), *tensor.size[len(place.index) :])
        out = torch.empty([b - a for a, b in zip(start, stop, strict=True)], dtype=tensor.properties.dtype)
        held = {tuple(offset): info for offset, info in self.stored[place.key]}
        for chunk in tensor.chunks:
            low = [max(a, o) for a, o in zip(start, chunk.offsets, strict=True)]
            high = [min(b, o + s) for b, o, s in zip(stop, chunk.offsets, chunk.sizes, strict=True)]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            data = self._chunk(held[tuple(chunk.offsets)])
            there = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, chunk.offsets, strict=True))
            here = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, start, strict=True))
            out[here] = data[there]
        whole = out[(0,) * len(place.index)]
        return whole[: self.hf_config.vocab_size] if name in VOCABULARY else whole

    def _chunk(self, info: Any) -> Tensor:
        with (self.path / info.relative_path).open("rb") as file:
            file.seek(info.offset)
            return torch.load(io.BytesIO(file.read(info.length)), map_location="cpu", weights_only=True)
