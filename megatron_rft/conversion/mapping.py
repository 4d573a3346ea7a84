"""Maps names and layouts of a model's tensors between Hugging Face and megatron-core.

A *canonical name* is a parameter's name in megatron-core's local spec with global numbers (layer over all pipeline
stages, expert over all expert-parallel ranks), such as
`decoder.layers.7.mlp.experts.local_experts.3.linear_fc1.weight`. The scalar head of a critic is `value_head.weight`. A
layer's adapters are `linear_qkv.adapter.a`, their A matrices one below the other, and `linear_qkv.adapter.b`, whose
rows are in the order of the layer's weight.
"""

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_rft.families.shapes import delta_rows, experts, head_dim, hf_parts, kv_heads, partition_dim
from megatron_rft.families.tables import family_of
from megatron_rft.families.towers import TOWER

GATE_AND_UP = re.compile(r".*\.linear_fc1\.(weight|bias|adapter\.b)")
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


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


TOP = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
    "value_head.weight": "score.weight",
}
# number of the layer, of the expert or None, part of the layer or the expert
LAYER = re.compile(r"decoder\.layers\.(\d+)\.(?:mlp\.experts\.local_experts\.(\d+)\.)?(.+)")
ADAPTER = re.compile(r"(.+)\.adapter\.([ab])")


@cache
def expert_of(name: str) -> int | None:
    """The number of the expert that a parameter belongs to."""
    in_layer = LAYER.fullmatch(name)
    return int(in_layer[2]) if in_layer and in_layer[2] else None


class Mapping:
    """Maps tensors of one HF model to unsharded megatron-core parameters and back, by canonical name."""

    def __init__(self, hf_config: Any):
        family = family_of(hf_config)
        self.layer, self.prefix, self.tower = family.layer, family.prefix, family.tower
        self.tied, self.vocab_size = hf_config.tie_word_embeddings, hf_config.vocab_size
        self.experts = experts(hf_config)
        self.groups = kv_heads(hf_config)
        self.head_dim = head_dim(hf_config)
        self.gated, self.interleaved = family.gated, family.sinks
        self.key_heads, self.delta = delta_rows(hf_config)
        self.hf_names = cache(self._hf_names)

    def _hf_names(self, name: str) -> list[str]:
        """Return the names of the HF tensors that form a parameter, in the order that `merge` expects."""
        if name in TOP:
            tied = self.tied and name == "output_layer.weight"
            return [TOP["embedding.word_embeddings.weight" if tied else name].replace("model.", self.prefix)]
        if adapter := ADAPTER.fullmatch(name):
            end = f".lora_{adapter[2].upper()}.weight"
            return [weight.removesuffix(".weight") + end for weight in self.hf_names(f"{adapter[1]}.weight")]
        if name.startswith(TOWER):
            return [name.replace(TOWER, self.tower, 1)]
        number, expert, part = LAYER.fullmatch(name).groups()
        target = self.layer[f"mlp.experts.{{e}}.{part}" if expert else part]
        return hf_parts(f"{self.prefix}layers.{number}.{target}".replace("{e}", expert or ""))

    def stacked_expert(self, name: str) -> int | None:
        """The number of the expert whose tensor `name` is a slice of one HF tensor of all experts; else None."""
        return None if any("{e}" in target for target in self.layer.values()) else expert_of(name)

    def merge(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """Merge HF tensors into a parameter. q, k and v are interleaved by query group: [q .. q k v] for each group.
        A slice of stacked experts is transposed, and its gate and up, if interleaved, put one after the other."""
        if (expert := self.stacked_expert(name)) is not None:
            part = parts[0][expert].T if parts[0].dim() == 3 else parts[0][expert]
            return torch.cat([part[::2], part[1::2]]) if self.interleaved and "linear_fc1" in name else part
        if (groups := self._groups(name)) is None:
            return torch.cat(list(parts)) if len(parts) > 1 else parts[0]
        parts = list(parts)
        if self.gated and ".linear_qkv." in name:  # q_proj has [q, gate] for each head
            both = parts[0].unflatten(0, (-1, 2, self.head_dim))
            parts[:1] = [each.flatten(0, 1) for each in both.unbind(1)]
        if "_qkv." in self.hf_names(name)[0] or "conv1d" in name:  # [q, k, v] of a delta net
            parts[:1] = parts[0].split([each * groups for each in self.delta[:3]])
        return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], 1).flatten(0, 1)

    def split(self, name: str, whole: Tensor) -> list[Tensor]:
        """Split a parameter into its HF tensors, or its slice of one: the inverse of `merge`."""
        if self.stacked_expert(name) is not None:
            mixed = self.interleaved and "linear_fc1" in name
            part = torch.stack(whole.chunk(2), 1).flatten(0, 1) if mixed else whole
            return [part.T if part.dim() == 2 else part]
        names, groups = self.hf_names(name), self._groups(name)
        if groups is None:
            return list(whole.chunk(len(names)))
        grouped = whole.unflatten(0, (groups, -1))
        parts = [part.flatten(0, 1) for part in grouped.split(self._rows(name, grouped.shape[1]), 1)]
        if self.gated and ".linear_qkv." in name:
            both = torch.stack([part.unflatten(0, (-1, self.head_dim)) for part in parts[:2]], 1)
            parts[:2] = [both.flatten(0, 2)]
        if "_qkv." in names[0] or "conv1d" in name:
            parts[:3] = [torch.cat(parts[:3])]
        return parts

    def _groups(self, name: str) -> int | None:
        """The number of groups of heads by which the HF tensors of a parameter are interleaved; None if they are not.
        Those of a delta net have a key head each, with its value heads."""
        if name.endswith((".adapter.a", ".layer_norm_weight")):  # the latter is Transformer Engine's fused norm
            return None
        if ".linear_qkv." in name:
            return self.groups
        return self.key_heads if name.endswith(("in_proj.weight", "conv1d.weight")) else None

    def _rows(self, name: str, rows: int) -> list[int]:
        """The rows of each part of a group of heads, which has `rows`."""
        if ".linear_qkv." in name:
            queries = (rows - 2 * self.head_dim) // (1 + self.gated)
            return [queries] * (1 + self.gated) + [self.head_dim] * 2
        if "conv1d" in name:
            return self.delta[:3]
        together = "_qkvz." in self.hf_names(name)[0]  # Qwen3-Next: [q, k, v, z] and [b, a]
        return [sum(self.delta[:4]), sum(self.delta[4:])] if together else self.delta
