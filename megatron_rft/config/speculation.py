"""Checks of `vllm.speculative_config`: vLLM's methods, and `predicted_output` of this package."""

import importlib.util
from typing import Any

from megatron_rft.config.messages import at, shown
from megatron_rft.utils.errors import did_you_mean

WITH_A_MODEL = {
    "draft_model": "drafts with a separate model",
    "eagle": "drafts with a head that was trained for the model",
    "eagle3": "drafts with a head that was trained for the model",
}
METHODS = ("ngram", "suffix", *WITH_A_MODEL, "predicted_output")


def check_words(given: dict[str, Any]) -> None:
    """Check vllm.speculative_config. Raises a pydantic error at the wrong key."""
    method, model, tokens = (given.get(key) for key in ("method", "model", "num_speculative_tokens"))
    if method not in METHODS:
        hint = did_you_mean(str(method), METHODS) or f" There are: {', '.join(METHODS)}."
        raise at("speculative_config.method", f"{shown(method)} is no method.{hint}")
    if not isinstance(tokens, int) or tokens < 1:
        raise at("speculative_config.num_speculative_tokens", f"{shown(tokens)} is no count of tokens, 1 or more")
    if method in WITH_A_MODEL and not model:
        raise at("speculative_config.model", f"is missing: method {method} {WITH_A_MODEL[method]}")
    if model and method not in WITH_A_MODEL:
        raise at("speculative_config.model", f"does nothing with method {method}")
    if given.get("use_heterogeneous_vocab"):
        raise at("speculative_config.use_heterogeneous_vocab", "needs tokenizers, and engines here have none")
    if method == "suffix" and importlib.util.find_spec("arctic_inference") is None:
        raise at("speculative_config.method", "suffix needs a missing package: pip install arctic-inference")
