"""Maps names and layouts of a model's tensors between Hugging Face and megatron-core, and lists their shapes.

A *canonical name* is a megatron-core parameter name with global numbers (layer over all pipeline stages, expert over
all expert-parallel ranks), such as `decoder.layers.7.mlp.experts.local_experts.3.linear_fc1.weight`; Transformer
Engine's grouped experts (`mlp.experts.linear_fc1.weight3`) mean the same. The scalar head of a critic is
`value_head.weight`.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_rft.families import DENSE, EXPERTS, TRANSFORMER_ENGINE, family_of, head_dim

TOP = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
    "value_head.weight": "score.weight",
}
LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
EXPERT = re.compile(
    r"mlp\.experts\."
    r"(?:local_experts\.(?P<local>\d+)\.(?P<local_part>.+\.weight)|(?P<grouped_part>.+\.weight)(?P<grouped>\d+))"
)


def is_mixture(hf_config: Any, layer: int) -> bool:
    """Return whether layer `layer`, counted from 0, has experts."""
    if not family_of(hf_config).experts:
        return False
    return layer not in (hf_config.mlp_only_layers or ()) and (layer + 1) % hf_config.decoder_sparse_step == 0


def canonical_names(hf_config: Any) -> Iterator[str]:
    """Yield the names of all parameters, as megatron-core's local spec has them, in the order of the layers."""
    family = family_of(hf_config)
    yield "embedding.word_embeddings.weight"
    for number in range(hf_config.num_hidden_layers):
        parts = family.layer.keys() - TRANSFORMER_ENGINE - (DENSE if is_mixture(hf_config, number) else EXPERTS).keys()
        for part in (part for part in family.layer if part in parts):
            name = f"decoder.layers.{number}.{part}"
            if "{e}" in part:
                name = name.replace("experts.{e}", "experts.local_experts.{e}")
                yield from (name.replace("{e}", str(expert)) for expert in range(hf_config.num_experts))
            else:
                yield name
    yield "decoder.final_layernorm.weight"
    if not hf_config.tie_word_embeddings:
        yield "output_layer.weight"


class Mapping:
    """Maps tensors of one HF model to unsharded megatron-core parameters and back, by canonical name."""

    def __init__(self, hf_config: Any):
        self.layer = family_of(hf_config).layer
        self.tied = hf_config.tie_word_embeddings
        self.groups = hf_config.num_key_value_heads
        self.head_dim = head_dim(hf_config)

    def hf_names(self, name: str) -> list[str]:
        """Return the names of the HF tensors that form a parameter, in the order that `merge` expects."""
        if name in TOP:
            tied = self.tied and name == "output_layer.weight"
            return [TOP["embedding.word_embeddings.weight" if tied else name]]
        number, rest = LAYER.fullmatch(name).groups()
        expert = EXPERT.fullmatch(rest)
        if expert:
            rest = f"mlp.experts.{{e}}.{expert['local_part'] or expert['grouped_part']}"
        target = f"model.layers.{number}.{self.layer[rest]}"
        if expert:
            target = target.replace("{e}", expert["local"] or expert["grouped"])
        several = re.search(r"\{(.+)\}", target)
        return [target.replace(several[0], part) for part in several[1].split(",")] if several else [target]

    def merge(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """Merge HF tensors into a parameter. q, k and v are interleaved by query group: [q .. q k v] for each group."""
        if ".linear_qkv." in name and len(parts) == 3:
            return torch.cat([p.unflatten(0, (self.groups, -1)) for p in parts], 1).flatten(0, 1)
        return torch.cat(list(parts)) if len(parts) > 1 else parts[0]

    def split(self, name: str, whole: Tensor) -> list[Tensor]:
        """Split a parameter into its HF tensors: the inverse of `merge`."""
        count = len(self.hf_names(name))
        if count < 3:
            return list(whole.chunk(count))
        grouped = whole.unflatten(0, (self.groups, -1))
        sizes = [grouped.shape[1] - 2 * self.head_dim, self.head_dim, self.head_dim]
        return [part.flatten(0, 1) for part in grouped.split(sizes, 1)]


def hf_shapes(hf_config: Any) -> dict[str, tuple[int, ...]]:
    """Return the shape of every HF tensor by name, in the order of the layers, without a tied output matrix."""
    c, hidden, heads = hf_config, hf_config.hidden_size, head_dim(hf_config)
    q, kv = c.num_attention_heads * heads, c.num_key_value_heads * heads
    family = family_of(hf_config)
    attention = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q)}
    layer = {f"self_attn.{name}.weight": shape for name, shape in attention.items()}
    if family.qkv_bias:
        layer |= {"self_attn.q_proj.bias": (q,), "self_attn.k_proj.bias": (kv,), "self_attn.v_proj.bias": (kv,)}
    if family.qk_norm:
        layer |= {"self_attn.q_norm.weight": (heads,), "self_attn.k_norm.weight": (heads,)}
    layer |= {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    shapes = {"model.embed_tokens.weight": (c.vocab_size, hidden)}
    for i in range(c.num_hidden_layers):
        feed_forward = _mixture_shapes(c) if is_mixture(c, i) else _mlp_shapes("mlp", hidden, c.intermediate_size)
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in (layer | feed_forward).items()}
    shapes["model.norm.weight"] = (hidden,)
    return shapes if c.tie_word_embeddings else shapes | {"lm_head.weight": (c.vocab_size, hidden)}


def _mlp_shapes(prefix: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    both = {f"{prefix}.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
    return both | {f"{prefix}.down_proj.weight": (hidden, inner)}


def _mixture_shapes(c: Any) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (c.num_experts, c.hidden_size)}
    for e in range(c.num_experts):
        shapes |= _mlp_shapes(f"mlp.experts.{e}", c.hidden_size, c.moe_intermediate_size)
    return shapes
