"""Splits a megatron-core parameter over tensor-parallel ranks, and joins its shards, by its canonical name."""

import re
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

COLUMN = re.compile(r"(^|.*\.)(word_embeddings|output_layer|linear_qkv|linear_fc1)\.(weight\d*|bias)")
ROW = re.compile(r".*\.(linear_proj|linear_fc2)\.weight\d*")
GATE_AND_UP = re.compile(r".*\.linear_fc1\.weight\d*")
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


def partition_dim(name: str) -> int | None:
    """Return the dimension that tensor parallelism splits; None if the parameter is replicated."""
    return 0 if COLUMN.fullmatch(name) else 1 if ROW.fullmatch(name) else None


def padded_vocab(vocab_size: int, tp_size: int) -> int:
    return -(-vocab_size // tp_size) * tp_size


def shard(name: str, whole: Tensor, size: int, rank: int) -> Tensor:
    """Return the shard of one rank. Gate and up are split separately; vocabulary rows are zero-padded to a multiple of
    `size`."""
    dim = partition_dim(name)
    if dim is None or size == 1:
        return whole
    if name in VOCABULARY and (more := padded_vocab(len(whole), size) - len(whole)):  # padding by nothing would copy
        whole = F.pad(whole, (0, 0, 0, more))
    if GATE_AND_UP.fullmatch(name):
        return torch.cat([half.chunk(size)[rank] for half in whole.chunk(2)])
    return whole.chunk(size, dim)[rank]


def unshard(name: str, parts: Sequence[Tensor], vocab_size: int) -> Tensor:
    """Join the shards of all ranks, in rank order; padded vocabulary rows are dropped."""
    if len(parts) > 1 and GATE_AND_UP.fullmatch(name):
        return torch.cat([torch.cat(halves) for halves in zip(*(p.chunk(2) for p in parts), strict=True)])
    whole = torch.cat(list(parts), partition_dim(name)) if len(parts) > 1 else parts[0]
    return whole[:vocab_size] if name in VOCABULARY else whole
