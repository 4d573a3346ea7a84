"""What a vLLM server says of itself (`vllm_server.Extension.rft_facts`), held against what a run needs of it."""

from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedConfig

from megatron_rft.config.vllm import EXACT_CACHES, FP8, SUPPORTED

MODEL = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")
STARTED_WITH = {  # fact -> what it has to be
    "transfer": "wire",
    "logprobs_mode": "processed_logprobs",
    "chunked_prefill": False,
}


def problems(
    facts: dict[str, Any], config: PreTrainedConfig, dtype: torch.dtype, longest: int, keep_caches: bool, how: str
) -> Iterator[str]:
    """Why this server will not do, each a sentence that lacks its URL at the beginning. `how`: it is to be started."""
    version = str(facts.get("vllm"))
    if not version.startswith(f"{SUPPORTED}."):
        yield f"runs vLLM {version}, and supported is {SUPPORTED}.x"
        return
    for name in MODEL:
        if facts[name] != getattr(config, name):
            yield f"serves another model: its {name} is {facts[name]}, that of model.path {getattr(config, name)}"
    if facts["dtype"] != str(dtype):
        yield f"computes in {facts['dtype']}, and rollout.dtype says {dtype}. {how}"
    for name, wanted in STARTED_WITH.items():
        if facts[name] != wanted:
            yield f"was started with another {name.replace('_', ' ')}, {facts[name]}, and {wanted} is needed. {how}"
    if facts["max_model_len"] < longest:
        yield (
            f"has room for {facts['max_model_len']} tokens of prompt and response, and this recipe has up to "
            f"{longest}: start it with --max-model-len {longest}, or lower data.max_prompt_tokens or "
            "rollout.max_response_tokens"
        )
    if keep_caches and facts["prefix_caching"]:
        yield (
            "would give new responses the keys and values of old weights, which rollout.cache_after_sync keeps: start "
            "it with --no-enable-prefix-caching, or recompute"
        )
    if facts["replicas"] > 1:
        yield (
            f"is {facts['replicas']} data-parallel replicas behind one URL, of which one alone would be asked whether "
            "its weights arrived: start a server for each, and name them all"
        )
    if facts["quantization"] not in (None, *FP8):
        yield (
            f"was started with --quantization {facts['quantization']}, and what is not proven to arrive is refused: "
            f"there is {', '.join(FP8)}"
        )


def rounds(facts: dict[str, Any]) -> bool:
    """Whether it computes with numbers that the trainer does not have."""
    return facts["quantization"] is not None or facts["kv_cache_dtype"] not in EXACT_CACHES
