"""Checks the facts that a vLLM server reports (`worker_extension.Extension.rft_facts`) against the needs of a run."""

from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedConfig

from megatron_rft.config.vllm import FP8, SUPPORTED

MODEL = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")
STARTED_WITH = {  # fact -> required value
    "transfer": "wire",
    "logprobs_mode": "processed_logprobs",
    "chunked_prefill": False,
}


def problems(
    facts: dict[str, Any], config: PreTrainedConfig, dtype: torch.dtype, longest: int, keep_caches: bool, how: str
) -> Iterator[str]:
    """Yield the problems of this server, each a sentence without its subject, the URL. `how`: how to start a server."""
    version = str(facts.get("vllm"))
    if not version.startswith(f"{SUPPORTED}."):
        yield f"runs vLLM {version}; this package supports {SUPPORTED}.x"
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
            "would give new responses the keys and values of old weights, which rollout.cache_after_sync=keep keeps: "
            "start it with --no-enable-prefix-caching, or set recompute"
        )
    if facts["replicas"] > 1:
        yield (
            f"has {facts['replicas']} data-parallel replicas behind one URL, and only one of them would verify its "
            "weights: start a server for each, and list them all"
        )
    if facts["quantization"] not in (None, *FP8):
        yield (
            f"was started with --quantization {facts['quantization']}, whose weights cannot be verified after a sync: "
            f"use {', '.join(FP8)}"
        )
