"""The shapes of a family's tensors, and how tensor parallelism splits them. No torch.

A configuration is transformers' or config.json's: an object with its fields.
"""

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

from megatron_rft.families.tables import EXPERT_BIAS, FAMILIES, QKV_BIAS, TRANSFORMER_ENGINE, family_of
from megatron_rft.families.towers import TOWER, sees, tower_shapes

SHAPES = {  # of Hugging Face's tensors in a layer, in the words of `sizes`
    "input_layernorm.weight": "hidden",
    "self_attn.o_proj.weight": "hidden attended",
    "self_attn.q_proj.weight": "q hidden",
    "self_attn.k_proj.weight": "k hidden",
    "self_attn.v_proj.weight": "k hidden",
    "self_attn.q_proj.bias": "q_bias",
    "self_attn.k_proj.bias": "k_bias",
    "self_attn.v_proj.bias": "k_bias",
    "self_attn.q_norm.weight": "normed_q",
    "self_attn.k_norm.weight": "normed_k",
    "self_attn.q_a_proj.weight": "q_latent hidden",
    "self_attn.q_b_proj.weight": "q_up q_latent",
    "self_attn.kv_a_proj_with_mqa.weight": "kv_down hidden",
    "self_attn.kv_b_proj.weight": "kv_up kv_latent",
    "self_attn.q_a_layernorm.weight": "q_latent",
    "self_attn.kv_a_layernorm.weight": "kv_latent",
    "post_attention_layernorm.weight": "hidden",
    "pre_feedforward_layernorm.weight": "hidden",
    "post_feedforward_layernorm.weight": "hidden",
    "mlp.gate_proj.weight": "ffn hidden",
    "mlp.up_proj.weight": "ffn hidden",
    "mlp.down_proj.weight": "hidden ffn",
    "mlp.gate.weight": "experts hidden",
    "mlp.gate.e_score_correction_bias": "experts",
    "mlp.experts.{e}.gate_proj.weight": "expert_ffn hidden",
    "mlp.experts.{e}.up_proj.weight": "expert_ffn hidden",
    "mlp.experts.{e}.down_proj.weight": "hidden expert_ffn",
    "block_sparse_moe.gate.weight": "experts hidden",
    "block_sparse_moe.e_score_correction_bias": "experts",
    "block_sparse_moe.experts.{e}.w1.weight": "expert_ffn hidden",
    "block_sparse_moe.experts.{e}.w3.weight": "expert_ffn hidden",
    "block_sparse_moe.experts.{e}.w2.weight": "hidden expert_ffn",
    "self_attn.sinks": "heads",
    "self_attn.o_proj.bias": "hidden",
    "linear_attn.dt_bias": "value_heads",
    "linear_attn.A_log": "value_heads",
    "linear_attn.in_proj_qkv.weight": "delta_qkv hidden",
    "linear_attn.in_proj_z.weight": "delta_values hidden",
    "linear_attn.in_proj_b.weight": "value_heads hidden",
    "linear_attn.in_proj_a.weight": "value_heads hidden",
    "linear_attn.in_proj_qkvz.weight": "delta_qkvz hidden",
    "linear_attn.in_proj_ba.weight": "delta_ba hidden",
    "linear_attn.conv1d.weight": "delta_qkv one kernel",
    "linear_attn.norm.weight": "delta_value",
    "linear_attn.out_proj.weight": "hidden delta_values",
    "mlp.shared_expert_gate.weight": "shared_gate hidden",
    "mlp.shared_expert.gate_proj.weight": "shared_ffn hidden",
    "mlp.shared_expert.up_proj.weight": "shared_ffn hidden",
    "mlp.shared_expert.down_proj.weight": "hidden shared_ffn",
    "mlp.router.weight": "experts hidden",
    "mlp.router.bias": "experts",
    "mlp.experts.gate_up_proj": "experts hidden gate_up",
    "mlp.experts.gate_up_proj_bias": "experts gate_up",
    "mlp.experts.down_proj": "experts expert_ffn hidden",
    "mlp.experts.down_proj_bias": "experts hidden",
    "mlp.shared_experts.gate_proj.weight": "shared_ffn hidden",
    "mlp.shared_experts.up_proj.weight": "shared_ffn hidden",
    "mlp.shared_experts.down_proj.weight": "hidden shared_ffn",
}
SEVERAL = re.compile(r"\{(\w+(?:,\w+)+)\}")
COLUMN = re.compile(
    r"(^|.*\.)(word_embeddings|output_layer|linear_qkv|linear_fc1|linear_(q|q_up|kv_up)_proj)"
    r"\.(weight|bias|adapter\.b)|.*\.(softmax_offset|heads_weight|(in_proj|conv1d)\.weight|dt_bias|A_log)"
)
ROW = re.compile(r".*\.(linear_proj|linear_fc2|out_proj)\.(weight|adapter\.a)")


# What published files of Gemma 3 leave out.
LEFT_OUT = dict(vocab_size=262208, num_attention_heads=8, num_key_value_heads=4, head_dim=256)
LEFT_OUT |= dict(max_position_embeddings=131072, tie_word_embeddings=True)


class Part(NamedTuple):
    """A tensor of a layer: megatron-core's name, the names of its Hugging Face tensors, and its unsharded shape."""

    name: str
    hf_names: tuple[str, ...]
    shape: tuple[int, ...]

    @property
    def expert(self) -> bool:
        return "{e}" in self.name

    @property
    def stacked(self) -> bool:
        """Whether Hugging Face has the tensors of all experts in one, transposed."""
        return self.expert and "{e}" not in self.hf_names[0]

    @property
    def parameter(self) -> bool:
        return self.name not in EXPERT_BIAS


def of_json(config: dict[str, Any]) -> SimpleNamespace:
    """The configuration of the text model in the content of a config.json, with the vision tower's `vision_config`."""
    kinds = [name for name, family in FAMILIES.items() if family.architecture in (config.get("architectures") or ())]
    kind = {"model_type": kinds[0] if kinds else None}
    found = kind | config | (config.get("text_config") or {})
    if found["model_type"] not in FAMILIES and kinds and FAMILIES[kinds[0]].tower:  # Qwen2.5-VL has no text_config
        found |= kind
    return SimpleNamespace(**(LEFT_OUT if found["model_type"] == "gemma3_text" else {}) | found)


def first(config: Any, *names: str, default: Any = None) -> Any:
    """The first of these fields that has a value: families name the same thing differently."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), default)


def experts(config: Any) -> int:
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    return first(config, *names, default=0) if family_of(config).experts else 0


def kv_heads(config: Any) -> int:
    return first(config, "num_key_value_heads", "num_attention_heads")


def head_dim(config: Any) -> int:
    """Of keys and queries."""
    if getattr(config, "kv_lora_rank", None):
        return config.qk_nope_head_dim + config.qk_rope_head_dim
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def is_mixture(config: Any, layer: int) -> bool:
    """Return whether layer `layer`, counted from 0, has experts."""
    if not experts(config) or layer < (first(config, "first_k_dense_replace") or 0):
        return False
    if kinds := first(config, "mlp_layer_types"):
        return kinds[layer] == "sparse"
    sparse = first(config, "decoder_sparse_step", default=1)
    return layer not in (first(config, "mlp_only_layers") or ()) and (layer + 1) % sparse == 0


def sizes(config: Any, layer: int) -> dict[str, int]:
    """The numbers behind the words of `SHAPES` in a layer, without those of tensors that it lacks."""
    own = _delta_sizes(config) if is_delta(config, layer) else _attention_sizes(config)
    own |= _mixture_sizes(config) if is_mixture(config, layer) else {"ffn": dense_ffn(config)}
    return {"hidden": config.hidden_size} | own


def _attention_sizes(c: Any) -> dict[str, int]:
    family, heads, groups, head = family_of(c), c.num_attention_heads, kv_heads(c), head_dim(c)
    q, k = heads * head, groups * head
    found = {"heads": heads, "q": q * (2 if family.gated else 1), "k": k, "attended": q}
    if family.has(QKV_BIAS) and first(c, "attention_bias", default=True):
        found |= {"q_bias": q, "k_bias": k}
    if family.qk_norm and first(c, "use_qk_norm", default=True):
        found |= {"normed_q": q, "normed_k": k} if family.whole_qk_norm else {"normed_q": head, "normed_k": head}
    if family.latent:
        found |= {"kv_down": c.kv_lora_rank + c.qk_rope_head_dim, "kv_latent": c.kv_lora_rank}
        found |= {"kv_up": heads * (c.qk_nope_head_dim + c.v_head_dim), "attended": heads * c.v_head_dim}
        if latent := first(c, "q_lora_rank"):
            found |= {"q_latent": latent, "q_up": found.pop("q")}
    return found


def is_delta(config: Any, layer: int) -> bool:
    """Return whether layer `layer`, counted from 0, is a delta net."""
    if not family_of(config).gated:
        return False
    if kinds := first(config, "layer_types"):
        return kinds[layer] == "linear_attention"
    return (layer + 1) % first(config, "full_attention_interval", default=4) != 0


def delta_rows(config: Any) -> tuple[int, list[int]]:
    """Return the key heads of a delta net, and the rows of each: q, k, v, gates, rates and decays."""
    if not family_of(config).gated:
        return 0, []
    key, value = config.linear_key_head_dim, config.linear_value_head_dim
    each = config.linear_num_value_heads // config.linear_num_key_heads
    return config.linear_num_key_heads, [key, key, each * value, each * value, each, each]


def _delta_sizes(c: Any) -> dict[str, int]:
    heads, rows = delta_rows(c)
    return {
        "value_heads": c.linear_num_value_heads,
        "delta_qkv": heads * sum(rows[:3]),
        "delta_qkvz": heads * sum(rows[:4]),
        "delta_ba": heads * sum(rows[4:]),
        "delta_values": heads * rows[3],
        "delta_value": c.linear_value_head_dim,
        "one": 1,
        "kernel": c.linear_conv_kernel_dim,
    }


def _mixture_sizes(c: Any) -> dict[str, int]:
    own = expert_ffn(c)
    shared = first(c, "shared_expert_intermediate_size", default=0) or (first(c, "n_shared_experts") or 0) * own
    found = {"experts": experts(c), "expert_ffn": own, "gate_up": 2 * own, "shared_gate": 1}
    return found | ({"shared_ffn": shared} if shared else {})


def expert_ffn(config: Any) -> int:
    return first(config, "moe_intermediate_size", "intermediate_size") if experts(config) else 0


def dense_ffn(config: Any) -> int:
    return config.moe_intermediate_size if not hasattr(config, "intermediate_size") else config.intermediate_size


def hf_parts(target: str) -> list[str]:
    """self_attn.{q,k}_proj.weight -> the two names."""
    several = SEVERAL.search(target)
    return [target.replace(several[0], each) for each in several[1].split(",")] if several else [target]


def layer_parts(config: Any, layer: int) -> Iterator[Part]:
    """Yield the tensors of a layer in the model's order, an expert's once."""
    known = sizes(config, layer)
    for name, target in family_of(config).layer.items():
        names = hf_parts(target)
        shapes = [tuple(known.get(word) for word in SHAPES[each].split()) for each in names]
        if name in TRANSFORMER_ENGINE or None in shapes[0]:
            continue
        part = Part(name, tuple(names), (sum(shape[0] for shape in shapes), *shapes[0][1:]))
        yield part._replace(shape=shapes[0][:0:-1]) if part.stacked else part


def canonical_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Return the unsharded shape of every tensor by its name in megatron-core's local spec, in the order of the layers,
    without a tied output matrix."""
    vocabulary = (config.vocab_size, config.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": vocabulary}
    for number in range(config.num_hidden_layers):
        for part in layer_parts(config, number):
            name = f"decoder.layers.{number}.{part.name}".replace("experts.{e}", "experts.local_experts.{e}")
            for expert in range(experts(config)) if part.expert else (0,):
                shapes[name.replace("{e}", str(expert))] = part.shape
    shapes["decoder.final_layernorm.weight"] = (config.hidden_size,)
    shapes |= _of_tower(config, TOWER)
    return shapes if config.tie_word_embeddings else shapes | {"output_layer.weight": vocabulary}


def hf_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Return the shape of every HF tensor by name, in the order of the layers, without a tied output matrix."""
    vocabulary, prefix = (config.vocab_size, config.hidden_size), family_of(config).prefix
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}embed_tokens.weight": vocabulary}
    for i in range(config.num_hidden_layers):
        known = sizes(config, i)
        for part in layer_parts(config, i):
            for name in part.hf_names:
                shape = tuple(known[word] for word in SHAPES[name].split())
                for expert in range(experts(config)) if "{e}" in name else (0,):
                    shapes[f"{prefix}layers.{i}.{name.replace('{e}', str(expert))}"] = shape
    shapes[f"{prefix}norm.weight"] = (config.hidden_size,)
    shapes |= _of_tower(config, family_of(config).tower)
    return shapes if config.tie_word_embeddings else shapes | {"lm_head.weight": vocabulary}


def _of_tower(config: Any, prefix: str) -> dict[str, tuple[int, ...]]:
    return {prefix + name: shape for name, shape in tower_shapes(config).items()} if sees(config) else {}


def partition_dim(name: str) -> int | None:
    """Return the dimension that tensor parallelism splits, by megatron-core's name; None if it is replicated."""
    if name.startswith(TOWER):
        return None
    return 0 if COLUMN.fullmatch(name) else 1 if ROW.fullmatch(name) else None
