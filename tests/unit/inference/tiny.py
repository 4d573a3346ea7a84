"""Tiny random models of the families that the engine supports, and engines with their weights."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from megatron_rft.families.shapes import hf_shapes
from megatron_rft.inference.hf.engine import HFEngine
from tests.families import FAMILIES
from tests.shapes import sizes

SHAPE = sizes(2, 32, 4, 2, 64, vocab_size=64, max_position_embeddings=256)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
CONFIGS = {
    "qwen3": Qwen3Config(**SHAPE, head_dim=12, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SHAPE, tie_word_embeddings=False),
    "llama": LlamaConfig(**SHAPE, tie_word_embeddings=False),
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, **EXPERTS, head_dim=8, tie_word_embeddings=False),
    **FAMILIES,
}


def build_model(family: str | PreTrainedConfig = "qwen3", seed: int = 0, scale: float = 4.0):
    """Larger weights than at initialisation: probabilities then differ much from token to token."""
    config = CONFIGS[family] if isinstance(family, str) else family
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and "embed" not in name:
            parameter.mul_(scale * 0.02 / config.initializer_range)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(-0.1, 0.1)
    return model


MIXTRAL = {".mlp.": ".block_sparse_moe.", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def hf_stream(model):
    """(name, tensor) as in a checkpoint: experts one by one, a tied output matrix left out."""
    for name, tensor in _stream(model):
        for word, on_disk in MIXTRAL.items() if model.config.model_type == "minimax_m2" else ():
            name = name.replace(word, on_disk)
        yield name, tensor


def _stream(model):
    for name, parameter in model.named_parameters():
        layer, part = name.removesuffix("gate_up_proj").removesuffix("down_proj"), name.rsplit(".", 1)[-1]
        if name in hf_shapes(model.config):
            yield name, parameter.clone()
        elif "experts" in name and part == "gate_up_proj":
            for e, both in enumerate(parameter):
                yield f"{layer}{e}.gate_proj.weight", both[: len(both) // 2].clone()
                yield f"{layer}{e}.up_proj.weight", both[len(both) // 2 :].clone()
        elif "experts" in name and part == "down_proj":
            yield from ((f"{layer}{e}.down_proj.weight", down.clone()) for e, down in enumerate(parameter))
        else:
            yield name, parameter.clone()
    yield from ((name, b.clone()) for name, b in model.named_buffers() if name.endswith("e_score_correction_bias"))


def build_engine(model, rows: int = 64) -> HFEngine:
    engine = HFEngine(model.config, max_batch_sequences=rows)
    engine.load_weights(hf_stream(model), version=3)
    return engine


def assert_supports(model, requests: list, found: dict, sampling) -> None:
    """Asserts that log-probs are those of the model's distribution over the supports, of up to top_k tokens that hold
    top_p of it, the sampled one among them."""
    sizes = set()
    for request in requests:
        for response in found[request.id]:
            ids = torch.tensor([*request.prompt_ids, *response.token_ids])
            logits = model(ids[None]).logits[0, len(request.prompt_ids) - 1 : -1] / sampling.temperature
            full = logits.log_softmax(-1)
            assert len(response.supports) == len(response.token_ids)
            for row, support, token, logprob in zip(
                full, response.supports, response.token_ids, response.logprobs, strict=True
            ):
                kept = row[list(support)]
                assert token in support and len(set(support)) == len(support) <= sampling.top_k
                assert abs((row[token] - kept.logsumexp(0)).item() - logprob) < 1e-4
                best = row.topk(sampling.top_k).values.log_softmax(-1).exp()
                assert kept.exp().sum() / row.topk(sampling.top_k).values.exp().sum() > sampling.top_p - 1e-4
                assert len(support) == 1 or best[: len(support) - 1].sum() < sampling.top_p + 1e-4
                sizes.add(len(support))
    assert len(sizes) > 1, sizes
