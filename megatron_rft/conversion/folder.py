"""The files of an HF model folder: safetensors shards with an index, config.json, tokenizer.

Reading checks names and shapes first, and then loads one tensor at a time. Writing saves shards as tensors arrive, into
a temporary folder that is renamed when it is complete. Pickles (`pytorch_model.bin`) are not read.
"""

import copy
import hashlib
import json
import os
import shutil
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig

from megatron_rft.families.checks import StoredTensors, some
from megatron_rft.families.shapes import of_json
from megatron_rft.families.tables import family_of
from megatron_rft.families.towers import sees
from megatron_rft.utils.errors import DataError

BLOCKS, BLOCK_BYTES = 64, 64 << 10  # sampled from each file of weights
TOKENIZERS = ("tokenizer.json", "*.model", "vocab.json", "vocab.txt", "*.tiktoken", "tekken.json")
TOKENIZER_FILES = (*TOKENIZERS, "merges.txt", "added_tokens.json")


def model_fingerprint(folder: Path) -> str:
    """Return a digest of config.json and of the weights: all names, shapes and file sizes, and evenly spaced blocks of
    values. Training changes nearly every value, so the blocks are enough to tell two models apart."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(8 + int.from_bytes(file.read(8), "little")))
            for block in range(BLOCKS):
                file.seek(max(size - BLOCK_BYTES, 0) * block // (BLOCKS - 1))
                digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()


def tokenizer_fingerprint(folder: Path) -> str:
    """Return a digest of the files that define the tokenization."""
    digest = hashlib.sha256()
    for path in _found(folder, TOKENIZER_FILES):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _found(folder: Path, names: tuple[str, ...]) -> list[Path]:
    return [path for name in names for path in sorted(folder.glob(name)) if path.is_file()]


def read_tokenizer(folder: Path, place: str, fix: str) -> Any:
    """Load the tokenizer in `folder`. Raises DataError, which names the `place` and, if there is none, the `fix`."""
    if not _found(folder, TOKENIZERS):  # transformers would make an empty one
        raise DataError(f"{place}: {folder} has no tokenizer (tokenizer.json or another of transformers' files). {fix}")
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise DataError(f"{place}: no tokenizer can be loaded from {folder}: {error}") from None


COMPANIONS = (*TOKENIZER_FILES, "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
COMPANIONS += ("chat_template.jinja", "chat_template.json")
COMPANIONS += ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")


def load_config(folder: Path) -> PreTrainedConfig:
    """Load the configuration of the language model in `folder`, as `language_config` returns it. Raises DataError."""
    try:
        # first, as transformers asks whether to run code from the folder where it has none of the model
        family_of(of_json(json.loads((folder / "config.json").read_text(encoding="utf-8"))))
        return language_config(AutoConfig.from_pretrained(folder, trust_remote_code=False))
    except (OSError, ValueError, DataError, StrictDataclassError) as error:  # the last: transformers, of invalid values
        reason = str(error).splitlines()[-1].strip() if isinstance(error, StrictDataclassError) else error
        raise DataError(f"no model configuration can be loaded from {folder}: {reason}") from None


def language_config(whole: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of the language model. That of a model that sees also has the tower's `vision_config`, the ids
    of its image and video tokens, and the whole configuration's content as `outer`."""
    text = whole.get_text_config()
    if text is not whole and sees(text):
        for name in ("vision_config", "image_token_id", "video_token_id", "tie_word_embeddings"):
            setattr(text, name, getattr(whole, name))
        text.outer = whole.to_dict()
    return text


def whole_config(hf_config: Any) -> PreTrainedConfig:
    """A copy of the configuration that a folder of this model has: the inverse of `language_config`."""
    if not sees(hf_config):
        return copy.deepcopy(hf_config)
    return AutoConfig.for_model(**copy.deepcopy(hf_config.outer))


class HFFolder(StoredTensors):
    """The tensors of an HF folder by name. `folder(name)` reads one; KeyError if there is none of that name."""

    def __init__(self, path: str | Path, hf_config: Any):
        super().__init__(path, hf_config)
        # Only one file is mapped at a time: pages read from it count as this process's memory until it is closed.
        self._open = lru_cache(maxsize=1)(lambda file: safe_open(self.path / file, "pt"))
        if self.skipped and os.environ.get("RANK", "0") == "0":
            what = f"{len(self.skipped)} tensors of other parts of the model are left out"
            print(f"{self.path}: {what}: {some(sorted(self.skipped))}", flush=True)

    def __call__(self, name: str) -> Tensor:
        file, stored = self.files[name]
        tensor = self._open(file).get_tensor(stored)
        return tensor.mT.contiguous() if name in self.turned else tensor


def copy_companions(source: str | Path | None, target: Path) -> None:
    """Copy those of the tokenizer, chat template and generation defaults that `source` has."""
    for path in _found(Path(source), COMPANIONS) if source is not None else ():
        shutil.copy(path, target / path.name)


def keep_one(path: Path) -> None:
    """Remove what `FolderWriter` has written or replaced beside the folder `path`. If a kill came between its two
    renames, what it was replacing is the folder again."""
    old, partial = (path.with_name(f".{path.name}.{which}") for which in ("old", "partial"))
    shutil.rmtree(partial, ignore_errors=True)
    if old.exists():
        os.rename(old, partial if path.exists() else path)
        shutil.rmtree(partial, ignore_errors=True)


class FolderWriter:
    """Writes an HF folder, which transformers can load: call `add` with each tensor, then `finish`."""

    def __init__(self, path: str | Path, shard_bytes: int = 4 << 30):
        self.path, self.shard_bytes = Path(path), shard_bytes
        self.partial = self.path.with_name(f".{self.path.name}.partial")
        keep_one(self.path)
        self.partial.mkdir(parents=True)
        self.pending: dict[str, Tensor] = {}
        self.shards: list[list[str]] = []
        self.total_bytes = 0
        self.dtype: torch.dtype | None = None

    def add(self, name: str, tensor: Tensor) -> None:
        tensor = tensor.detach().to("cpu", copy=True).contiguous()
        self.pending[name] = tensor
        self.dtype = self.dtype or tensor.dtype
        self.total_bytes += tensor.nbytes
        if sum(t.nbytes for t in self.pending.values()) >= self.shard_bytes:
            self._flush()

    def _flush(self) -> None:
        save_file(self.pending, self.partial / f"{len(self.shards)}.safetensors", metadata={"format": "pt"})
        self.shards.append(list(self.pending))
        self.pending = {}

    def finish(self, hf_config: Any, tokenizer_folder: str | Path | None) -> None:
        """Name the shards, add configuration and tokenizer, and rename the folder; an existing one is replaced."""
        if self.pending:
            self._flush()
        self._name_shards()
        config, architecture = whole_config(hf_config), family_of(hf_config).architecture
        if any("score.weight" in names for names in self.shards):  # a critic
            architecture, config.num_labels = architecture.replace("CausalLM", "SequenceClassification"), 1
        config.architectures, config.dtype = [architecture], self.dtype
        config.save_pretrained(self.partial)
        copy_companions(tokenizer_folder, self.partial)
        if self.path.exists():
            os.rename(self.path, self.path.with_name(f".{self.path.name}.old"))
        os.rename(self.partial, self.path)
        keep_one(self.path)

    def _name_shards(self) -> None:
        count = len(self.shards)
        if count == 1:
            os.rename(self.partial / "0.safetensors", self.partial / "model.safetensors")
            return
        weight_map = {}
        for i, names in enumerate(self.shards):
            file = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
            os.rename(self.partial / f"{i}.safetensors", self.partial / file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
        (self.partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
