"""Reads what a model's config.json says about layouts and parameters. No torch."""

import json
import math
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_rft.families import checks, shapes
from megatron_rft.families.tables import EXPERT_BIAS, family_of
from megatron_rft.families.towers import sees
from megatron_rft.plan.tower import Tower
from megatron_rft.utils.errors import DataError, did_you_mean

HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")  # organisation/model


class ModelShape:
    def __init__(self, config: dict[str, Any]):
        """`config`: the content of a config.json. Raises AttributeError where a field is missing."""
        c = shapes.of_json(config)
        family = family_of(c)
        self.layers: int = c.num_hidden_layers
        self.hidden: int = c.hidden_size
        self.heads: int = c.num_attention_heads
        self.kv_heads = shapes.kv_heads(c)  # query groups
        self.head_dim = shapes.head_dim(c)
        self.q, self.kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.ffn = shapes.dense_ffn(c)  # intermediate size of a dense layer
        self.experts = shapes.experts(c)  # 0: dense
        self.expert_ffn = shapes.expert_ffn(c)
        self.experts_per_token: int = shapes.first(c, "num_experts_per_tok", default=0)
        self.expert_bias = family.has(EXPERT_BIAS) and self.experts > 0  # whether the routers have one
        self.max_positions: int = c.max_position_embeddings
        self.vocabulary: int = c.vocab_size
        self.tower = Tower(c) if sees(c) else None
        self.tied = bool(shapes.first(c, "tie_word_embeddings"))  # the embedding is also the output matrix
        self.gemma = family.gemma  # four norms in a layer, and a GELU whose result is kept
        # reasons, empty if there are none: why sequences cannot be cut or share prompts, why TP needs sequence
        # parallelism, why experts cannot be cut
        self.whole_sequences = checks.whole_sequences(c)
        self.sequence_parallel = checks.needs_sequence_parallel(c)
        self.whole_experts = checks.whole_experts(c)
        self.own_groups = family.gated or family.whole_qk_norm  # whether each rank needs a kv head of its own
        self.parts = tuple(tuple(shapes.layer_parts(c, i)) for i in range(self.layers))  # by layer
        self.mixture = tuple(any(part.expert for part in layer) for layer in self.parts)  # whether it has experts
        names = [{part.name for part in layer} for layer in self.parts]
        self.qk_norm = any("self_attention.q_layernorm." in name for layer in names for name in layer)
        self.delta_share = sum("self_attention.A_log" in layer for layer in names) / self.layers  # of delta nets
        heads, rows = shapes.delta_rows(c)
        # of a delta net: key heads, their size, value heads of each, their size
        self.delta = (heads, rows[0], rows[4], rows[2] // rows[4]) if heads else (0, 0, 0, 0)
        self.unread = "attention sinks" if family.sinks else "delta nets" if heads else ""  # in a vLLM engine

    def __str__(self) -> str:
        experts = f", {self.experts} experts" if self.experts else ""
        return f"{self.layers} layers, {self.heads} heads, {self.kv_heads} kv heads, hidden {self.hidden}{experts}"

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
        count += self.tower.whole if self.tower else 0
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
    raise DataError(f"{option}: there is no such model folder, {folder.absolute()}.{did_you_mean(str(folder), near)}")


def _cached(name: str, files: Sequence[str]) -> Path | None:
    """Return the snapshot of a hub model in the local cache."""
    from huggingface_hub import errors, snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=list(files), local_files_only=True))
    except (errors.LocalEntryNotFoundError, errors.HFValidationError):
        return None
    return folder if (folder / "config.json").is_file() else None  # another program fetched only the tokenizer


def is_whole(folder: Path) -> bool:
    """Return whether all weight files of a model are present, judged by name."""
    try:
        return bool(checks.weight_files(folder))
    except DataError:
        return False


def read_config(folder: Path, option: str = "model.path") -> dict[str, Any]:
    try:
        return json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{option}: {folder} has no config.json: it is not a model in Hugging Face format") from None
    except ValueError as error:
        raise DataError(f"{option}: {folder / 'config.json'} is not valid JSON: {error}") from None


def find_shape(path: str, option: str = "model.path", loads: bool = True) -> ModelShape | None:
    """Return the shape of a model; None before its download. If a run `loads` its weights, they are checked against it,
    by the headers of their files. Of folders only model.path must have them."""
    folder = find_model(path, option)
    must = option == "model.path" and Path(path).expanduser().is_dir()
    return read_shape(folder, option, loads and (must or is_whole(folder))) if folder else None


def read_shape(folder: Path, option: str = "model.path", check_weights: bool = False) -> ModelShape:
    config, file = read_config(folder, option), folder / "config.json"
    c = shapes.of_json(config)
    kinds, layers = shapes.first(c, "layer_types"), shapes.first(c, "num_hidden_layers")
    if kinds and len(kinds) != layers:
        raise DataError(
            f"{option}: {file} names {len(kinds)} layer_types for num_hidden_layers {layers}: make them equally many, "
            "or leave layer_types out"
        )
    try:
        if refused := checks.why_unsupported(c):
            raise DataError(refused)
        vars(c).setdefault("tie_word_embeddings", True)  # where it is silent, an output matrix may be there
        if check_weights:
            checks.StoredTensors(folder, c)
        return ModelShape(config)
    except DataError as error:
        raise DataError(f"{option}: {file}: {error}") from None
    except AttributeError as error:
        raise DataError(f"{option}: {file} lacks {error.name!r}") from None
