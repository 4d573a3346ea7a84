"""Tiny random models of the families that the engine supports, and engines with their weights."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from megatron_rft.inference.hf.engine import HFEngine

SHAPE = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
CONFIGS = {
    "qwen3": Qwen3Config(**SHAPE, head_dim=12, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SHAPE, tie_word_embeddings=False),
    "llama": LlamaConfig(**SHAPE, tie_word_embeddings=False),
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, **EXPERTS, head_dim=8, tie_word_embeddings=False),
}


def build_model(family: str | PreTrainedConfig = "qwen3", seed: int = 0, scale: float = 4.0):
    """Larger weights than at initialisation: probabilities then differ much from token to token."""
    config = CONFIGS[family] if isinstance(family, str) else family
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and "embed" not in name:
            parameter.mul_(scale)
    return model


def hf_stream(model):
    """(name, tensor) as in a checkpoint: experts one by one, a tied output matrix left out."""
    for name, parameter in model.named_parameters():
        layer, part = name.removesuffix("gate_up_proj").removesuffix("down_proj"), name.rsplit(".", 1)[-1]
        if "experts" in name and part == "gate_up_proj":
            for e, both in enumerate(parameter):
                yield f"{layer}{e}.gate_proj.weight", both[: len(both) // 2].clone()
                yield f"{layer}{e}.up_proj.weight", both[len(both) // 2 :].clone()
        elif "experts" in name and part == "down_proj":
            yield from ((f"{layer}{e}.down_proj.weight", down.clone()) for e, down in enumerate(parameter))
        else:
            yield name, parameter.clone()


def build_engine(model, rows: int = 64) -> HFEngine:
    engine = HFEngine(model.config, max_batch_sequences=rows)
    engine.load_weights(hf_stream(model), version=3)
    return engine
