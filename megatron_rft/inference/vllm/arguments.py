"""Builds vLLM's arguments and sampling parameters, for an engine in this process and for a server."""

import json
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from megatron_rft.config.sections import MAX_TOP_K
from megatron_rft.conversion.folder import whole_config
from megatron_rft.families.checks import rope
from megatron_rft.families.shapes import head_dim
from megatron_rft.families.tables import EXPERT_BIAS, family_of
from megatron_rft.families.towers import deep_layers, sees
from megatron_rft.inference.engine import Request, Sampling, limit, request_seed
from megatron_rft.utils.errors import RunFailed

PREFILL_TOKENS = 8192  # in one forward pass
CACHE_BYTES = 1 << 30  # default limit of the KV cache on the CPU
CACHE_BLOCK = 128  # tokens
LOGPROBS_PER_TOP_K = 2  # vLLM keeps all tokens that are as probable as the last of the top_k
LEFT_OUT = -1000.0  # log-probs below are those of tokens that truncated sampling left out
# For images.py: vLLM would compute the largest image at its start, and keep what its processor returns.
# Workers share the images, each with the whole tower.
SEEING = {"skip_mm_profiling": True, "mm_processor_cache_gb": 0, "mm_encoder_tp_mode": "data"}
# GPUs would default to vLLM's second model runner, which no test of this package has met yet.
RUNNER = {"VLLM_USE_V2_MODEL_RUNNER": "0"}


def save_config(config: PreTrainedConfig, folder: Path) -> None:
    """Save the configuration that vLLM builds the model from; the trainer sends the weights later."""
    whole, kind = whole_config(config), config.model_type
    whole.architectures = [family_of(config).architecture if sees(config) else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]]
    if sees(config) and deep_layers(config):  # other code has it from the family, and vLLM from here
        whole.get_text_config().rope_parameters["mrope_interleaved"] = True
    # What published files say, and transformers need not: without it vLLM's routers have a softmax and no biases.
    if family_of(config).has(EXPERT_BIAS):
        whole.topk_method, whole.scoring_func, whole.use_routing_bias = "noaux_tc", "sigmoid", True
    if kind == "minimax_m2":
        whole.rotary_dim = round(head_dim(config) * rope(config)["partial_rotary_factor"])
    whole.save_pretrained(folder)


def common(model: str, dtype: torch.dtype, transfer: str, longest: int, sequences: int) -> dict[str, Any]:
    """Return the arguments of every engine that receives a trainer's weights, by the weight transfer `transfer`.
    `longest`: the most tokens of a prompt and its response; `sequences`: the most sequences at one time."""
    return {
        "model": model,
        "dtype": str(dtype).removeprefix("torch."),
        "load_format": "dummy",
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",  # under the distribution that is sampled from
        "max_logprobs": LOGPROBS_PER_TOP_K * MAX_TOP_K,
        "weight_transfer_config": {"backend": transfer},
        "skip_tokenizer_init": True,
        "async_scheduling": False,  # a sync would find a step in flight (docs/engines.md)
        "enable_chunked_prefill": False,  # vLLM crashes with chunked prefill and per-request seeds
        "max_num_batched_tokens": max(PREFILL_TOKENS, longest, sequences),  # prompts are not split
    }


def token_bytes(config: PreTrainedConfig, dtype: torch.dtype, ranks: int) -> int:
    """Return the bytes of a token's keys and values on each of an engine's `ranks`."""
    heads = max(1, config.num_key_value_heads // ranks)
    return 2 * config.num_hidden_layers * heads * head_dim(config) * dtype.itemsize


def cache_bytes(config: PreTrainedConfig, dtype: torch.dtype, longest: int, sequences: int, ranks: int = 1) -> int:
    """Return the size of the KV cache on the CPU for each of the engine's `ranks`: all sequences at their longest, at
    most CACHE_BYTES, but at least two sequences."""
    sequence = token_bytes(config, dtype, ranks) * (-(-longest // CACHE_BLOCK) + 1) * CACHE_BLOCK
    return max(min(sequence * sequences, CACHE_BYTES), 2 * sequence)


def speculation(given: dict[str, Any]) -> dict[str, Any]:
    """Return vLLM's configuration of speculative decoding. A draft model loads its weights from its folder."""
    return {"draft_load_config": {"load_format": "auto"}} | given if given.get("model") else dict(given)


def command(
    model: str,
    dtype: torch.dtype,
    port: int = 8000,
    host: str = "127.0.0.1",
    arguments: dict[str, Any] | None = None,
    seeing: bool = False,
) -> list[str]:
    """Return the command line of a server that accepts weights from a trainer. `seeing`: its model reads images."""
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
    options |= SEEING if seeing else {}
    flags = [part for name, value in (options | arguments).items() for part in flag(name, value)]
    module = "megatron_rft.inference.vllm.seeing_server" if seeing else "vllm.entrypoints.openai.api_server"
    return [sys.executable, "-m", module, *flags]


def sampling_parameters(request: Request, sample: int, sampling: Sampling) -> dict[str, Any]:
    """Return vLLM's parameters for response number `sample` to a request."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "max_tokens": limit(request, sampling),
        "seed": request_seed(request.seed, sample),
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,  # only `stop_token_ids` end a response
        "logprobs": LOGPROBS_PER_TOP_K * sampling.top_k if sampling.truncates else 0,  # beside the sampled token's
        "detokenize": False,
    }


def kept_tokens(candidates: Iterable[tuple[int, float]]) -> tuple[int, ...]:
    """Return the tokens that truncated sampling kept at one position, from its most probable (token, log-prob) pairs;
    vLLM gives the others a log-prob of -inf, or -9999 in JSON.

    Raises:
        RunFailed: the candidates do not hold the whole distribution.
    """
    kept = {token: logprob for token, logprob in candidates if logprob > LEFT_OUT}
    mass = math.fsum(map(math.exp, kept.values()))
    if abs(mass - 1) > 1e-3:
        raise RunFailed(
            f"vLLM's {len(kept)} most probable tokens have {mass:.4f} of the truncated distribution, and training on "
            "it needs all of it: too many tokens are equally probable at rollout.top_k. Set another rollout.top_k"
        )
    return tuple(kept)


def flag(name: str, value: Any) -> list[str]:
    """Format an option for vLLM's command line."""
    name = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, list):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]
