"""Reads what a model's config.json says about layouts and parameters. No torch."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_rft.families import FAMILIES
from megatron_rft.families.checks import needs_sequence_parallel, whole_experts, whole_sequences, why_unsupported
from megatron_rft.families.shapes import (
    Part,
    delta_rows,
    dense_ffn,
    expert_ffn,
    experts,
    first,
    head_dim,
    kv_heads,
    layer_parts,
    of_json,
)
from megatron_rft.families.tables import EXPERT_BIAS, family_of
from megatron_rft.utils.errors import DataError, did_you_mean

HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")  # organisation/model


@dataclass(frozen=True)
class ModelShape:
    layers: int
    hidden: int
    heads: int
    kv_heads: int  # query groups
    ffn: int  # intermediate size of a dense layer
    experts: int  # 0: dense
    expert_ffn: int
    max_positions: int
    vocabulary: int
    head_dim: int
    # reasons, empty if there are none: why sequences cannot be cut or share prompts, why TP needs sequence parallelism,
    # why experts cannot be cut
    whole_sequences: str = field(default="", kw_only=True)
    sequence_parallel: str = field(default="", kw_only=True)
    whole_experts: str = field(default="", kw_only=True)
    expert_bias: bool = field(default=False, kw_only=True)  # whether the routers have one
    gemma: bool = field(default=False, kw_only=True)  # four norms in a layer, and a GELU whose result is kept
    tied: bool = field(default=False, kw_only=True)  # the embedding is also the output matrix
    experts_per_token: int = field(default=0, kw_only=True)
    parts: tuple[tuple[Part, ...], ...] = field(default=(), kw_only=True)  # by layer
    # of a delta net: key heads, their size, value heads of each, their size
    delta: tuple[int, int, int, int] = field(default=(0, 0, 0, 0), kw_only=True)

    @classmethod
    def read(cls, folder: Path) -> "ModelShape":
        return cls.of(read_config(folder))

    @classmethod
    def of(cls, config: dict[str, Any]) -> "ModelShape":
        """`config`: the content of a config.json. Raises AttributeError where a field is missing."""
        c = of_json(config)
        delta_heads, rows = delta_rows(c)
        return cls(
            layers=c.num_hidden_layers,
            hidden=c.hidden_size,
            heads=c.num_attention_heads,
            kv_heads=kv_heads(c),
            ffn=dense_ffn(c),
            experts=experts(c),
            expert_ffn=expert_ffn(c),
            max_positions=c.max_position_embeddings,
            vocabulary=c.vocab_size,
            head_dim=head_dim(c),
            whole_sequences=whole_sequences(c),
            sequence_parallel=needs_sequence_parallel(c),
            whole_experts=whole_experts(c),
            expert_bias=family_of(c).has(EXPERT_BIAS) and experts(c) > 0,
            gemma=family_of(c).gemma,
            tied=bool(first(c, "tie_word_embeddings")),
            experts_per_token=first(c, "num_experts_per_tok", default=0),
            parts=tuple(tuple(layer_parts(c, i)) for i in range(c.num_hidden_layers)),
            delta=(delta_heads, rows[0], rows[4], rows[2] // rows[4]) if delta_heads else (0, 0, 0, 0),
        )

    def __str__(self) -> str:
        experts = f", {self.experts} experts" if self.experts else ""
        return f"{self.layers} layers, {self.heads} heads, {self.kv_heads} kv heads, hidden {self.hidden}{experts}"

    @cached_property
    def mixture(self) -> tuple[bool, ...]:
        """Whether each layer has experts."""
        return tuple(any(part.expert for part in layer) for layer in self.parts)

    @cached_property
    def qk_norm(self) -> bool:
        return any(part.name.startswith("self_attention.q_layernorm.") for layer in self.parts for part in layer)

    @cached_property
    def delta_share(self) -> float:
        """The share of the layers that are delta nets."""
        return sum(any(part.name.endswith(".A_log") for part in layer) for layer in self.parts) / len(self.parts)

    @property
    def q(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        return self.kv_heads * self.head_dim

    @cached_property
    def multiplied(self) -> int:
        """Parameters of the matrices that multiply a token: of its own experts only, and without the embedding."""
        count = self.vocabulary * self.hidden
        for part in (part for layer in self.parts for part in layer if len(part.shape) == 2):
            count += math.prod(part.shape) * (self.experts_per_token if part.expert else 1)
        return count

    def whole(self) -> int:
        """Return the number of parameters of the whole model."""
        count = (1 if self.tied else 2) * self.vocabulary * self.hidden + self.hidden
        for part in (part for layer in self.parts for part in layer if part.parameter):
            count += math.prod(part.shape) * (self.experts if part.expert else 1)
        return count


def find_model(path: str, option: str = "model.path", files: Sequence[str] = ("config.json",)) -> Path | None:
    """Return the local folder of a model; None for a hub name whose `files` (patterns) are not downloaded yet."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise DataError(f"{option}: {path} is a file; a model is a folder with config.json and *.safetensors")
    if HUB_NAME.fullmatch(path) and not folder.parent.is_dir():
        return _cached(path, files)
    near = [str(other) for other in folder.parent.glob("*/")] if folder.parent.is_dir() else []
    raise DataError(f"{option}: there is no such model folder, {path}.{did_you_mean(str(folder), near)}")


def _cached(name: str, files: Sequence[str]) -> Path | None:
    """Return the snapshot of a hub model in the local cache."""
    from huggingface_hub import errors, snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=list(files), local_files_only=True))
    except (errors.LocalEntryNotFoundError, errors.HFValidationError):
        return None
    whole = (folder / "config.json").is_file()  # missing if another program fetched only the tokenizer
    return folder if whole else None


def is_whole(folder: Path) -> bool:
    """Return whether all weight files of a model are present, judged by name."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return all((folder / name).is_file() for name in set(json.loads(index.read_text())["weight_map"].values()))
    return any(folder.glob("*.safetensors"))


def read_config(folder: Path, option: str = "model.path") -> dict[str, Any]:
    try:
        return json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{option}: {folder} has no config.json: it is not a model in Hugging Face format") from None
    except ValueError as error:
        raise DataError(f"{option}: {folder / 'config.json'} is not valid JSON: {error}") from None


def read_shape(folder: Path, option: str = "model.path") -> ModelShape:
    config = read_config(folder, option)
    if of_json(config).model_type not in FAMILIES:
        raise DataError(
            f"{option}: the architecture of {folder} is not supported: "
            f"{', '.join(config.get('architectures') or ['none named'])}. "
            f"Supported are {', '.join(family.architecture for family in FAMILIES.values())}"
        )
    text = vars(of_json(config))
    kinds, layers = text.get("layer_types"), text.get("num_hidden_layers")
    if kinds and len(kinds) != layers:
        raise DataError(
            f"{option}: {folder / 'config.json'} names {len(kinds)} layer_types for num_hidden_layers {layers}: make "
            "them equally many, or leave layer_types out"
        )
    try:
        refused = why_unsupported(of_json(config))
        shape = None if refused else ModelShape.of(config)
    except AttributeError as error:
        raise DataError(f"{option}: {folder / 'config.json'} lacks {error.name!r}") from None
    if refused:
        raise DataError(f"{option}: {folder}: {refused}")
    return shape
