"""Builds vLLM's arguments and sampling parameters, for an engine in this process and for a server."""

import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from megatron_rft.families import head_dim
from megatron_rft.inference.engine import Request, Sampling, limit, request_seed

PREFILL_TOKENS = 8192  # in one forward pass
CACHE_BYTES = 1 << 30  # default limit of the KV cache on the CPU
CACHE_BLOCK = 128  # tokens


def save_config(config: PreTrainedConfig, folder: Path) -> None:
    """Save the configuration that vLLM builds the model from; the trainer sends the weights later."""
    config = copy.deepcopy(config)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.save_pretrained(folder)


def common(model: str, dtype: torch.dtype, transfer: str, longest: int, sequences: int) -> dict[str, Any]:
    """Return the arguments of every engine that receives a trainer's weights, by the weight transfer `transfer`.
    `longest`: the most tokens of a prompt and its response; `sequences`: the most sequences at one time."""
    return {
        "model": model,
        "dtype": str(dtype).removeprefix("torch."),
        "load_format": "dummy",
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",  # under the distribution that is sampled from
        "weight_transfer_config": {"backend": transfer},
        "skip_tokenizer_init": True,
        "enable_chunked_prefill": False,  # vLLM crashes with chunked prefill and per-request seeds
        "max_num_batched_tokens": max(PREFILL_TOKENS, longest, sequences),  # prompts are not split
    }


def cache_bytes(config: PreTrainedConfig, dtype: torch.dtype, longest: int, sequences: int, ranks: int = 1) -> int:
    """Return the size of the KV cache on the CPU for each of the engine's `ranks`: all sequences at their longest, at
    most CACHE_BYTES, but at least one sequence."""
    heads = max(1, config.num_key_value_heads // ranks)  # key-value heads of each rank
    token = 2 * config.num_hidden_layers * heads * head_dim(config) * dtype.itemsize
    sequence = token * (-(-longest // CACHE_BLOCK) + 1) * CACHE_BLOCK
    return max(min(sequence * sequences, CACHE_BYTES), 2 * sequence)


def speculation(given: dict[str, Any]) -> dict[str, Any]:
    """Return vLLM's configuration of speculative decoding. Predicted output is this package's own proposer; a draft
    model loads its weights from its folder."""
    config = {"draft_load_config": {"load_format": "auto"}} | given if given.get("model") else dict(given)
    if config["method"] == "predicted_output":
        config |= {"method": "custom_class", "model": "megatron_rft.inference.vllm.proposer.PredictedOutput"}
    return config


def command(
    model: str,
    dtype: torch.dtype,
    port: int = 8000,
    host: str = "127.0.0.1",
    arguments: dict[str, Any] | None = None,
) -> list[str]:
    """Return the command line of a server that accepts weights from a trainer."""
    arguments = arguments or {}
    longest, sequences = arguments.get("max_model_len", 0), arguments.get("max_num_seqs", 0)
    options = common(model, dtype, "wire", longest, sequences) | {
        "host": host,
        "port": port,
        "worker_extension_cls": "megatron_rft.inference.vllm.worker_extension.Extension",
        "middleware": "megatron_rft.inference.vllm.token_check.RequireToken",
        "enable_scale_out": True,  # the endpoint for token ids
        "disable_uvicorn_access_log": True,
    }
    options |= {} if torch.cuda.is_available() else {"enforce_eager": True}
    flags = [part for name, value in (options | arguments).items() for part in flag(name, value)]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags]


def sampling_parameters(request: Request, sample: int, sampling: Sampling) -> dict[str, Any]:
    """Return vLLM's parameters for response number `sample` to a request."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": limit(request, sampling),
        "seed": request_seed(request.seed, sample),
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,  # only `stop_token_ids` end a response
        "logprobs": 0,
        "detokenize": False,
    }


def flag(name: str, value: Any) -> list[str]:
    """Format an option for vLLM's command line."""
    name = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, list):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]
