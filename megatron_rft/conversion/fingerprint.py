"""Digests that identify a model or a tokenizer by its files, without reading all of the weights."""

import hashlib
from pathlib import Path

BLOCKS, BLOCK_BYTES = 64, 64 << 10  # sampled from each file of weights
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json")


def of_model(folder: Path) -> str:
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


def of_tokenizer(folder: Path) -> str:
    """Return a digest of the files that define the tokenization."""
    digest = hashlib.sha256()
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            digest.update(name.encode() + (folder / name).read_bytes())
    return digest.hexdigest()
