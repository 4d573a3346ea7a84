"""The tensors of LoRA adapters by Hugging Face's names, and their folders in PEFT's format.

A folder has adapter_model.safetensors, whose names are those of transformers' modules after a prefix,
adapter_config.json, and base.json with the fingerprint of the model that the adapters were trained on.
"""

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_rft.config.lora import TARGETS, VISION, Lora
from megatron_rft.families.shapes import hf_shapes
from megatron_rft.families.tables import family_of
from megatron_rft.families.towers import TOWER, sees
from megatron_rft.utils.errors import DataError
from megatron_rft.utils.files import replacing, write_atomically

Lookup = Callable[[str], Tensor]
PREFIX = "base_model.model."
TENSORS, CONFIG, BASE = "adapter_model.safetensors", "adapter_config.json", "base.json"
CHANGING = ("pissa", "olora", "corda", "lora_ga", "loftq")  # initial values by which PEFT changes the model, too


def shapes(hf_config: Any, options: Lora) -> dict[str, tuple[int, int]]:
    """HF name -> shape of every A [rank, in] and B [out, rank]."""
    adapters = {}
    for name, shape in hf_shapes(hf_config).items():
        if has_adapter(name, options):
            module = name.removesuffix(".weight")
            adapters[f"{module}.lora_A.weight"] = (options.rank, shape[1])
            adapters[f"{module}.lora_B.weight"] = (shape[0], options.rank)
    return adapters


def has_adapter(name: str, options: Lora) -> bool:
    """Whether a tensor has an adapter. Experts have none."""
    if TOWER in name:
        return "vision" in options.targets and bool(VISION.fullmatch(name.removesuffix(".weight")))
    modules = tuple(f".{module}.weight" for target in options.targets for module in TARGETS.get(target, ()))
    return name.endswith(modules) and ".experts." not in name


def peft_name(name: str, hf_config: Any) -> str:
    """PEFT's name of a tensor: that of transformers' module, which a published file may call otherwise."""
    family = family_of(hf_config)
    if family.tower:
        seen = name.startswith(family.tower)
        own, theirs = (family.tower, "model.visual.") if seen else (family.prefix, "model.language_model.")
        name = name.replace(own, theirs, 1)
    return PREFIX + name


def write(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], options: Lora, hf_config: Any, base: str, fingerprint: str
) -> None:
    """Write adapters to `folder`. `base`: where PEFT looks for the model."""
    folder.mkdir(parents=True, exist_ok=True)
    named = {peft_name(name, hf_config): tensor.contiguous() for name, tensor in tensors}
    with replacing(folder / TENSORS) as new:
        save_file(named, new, metadata={"format": "pt"})
    config = options.peft() | {"lora_dropout": options.dropout, "base_model_name_or_path": base}
    config |= {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "inference_mode": True}
    if sees(hf_config) and "vision" not in options.targets:  # the tower may have modules of the same names
        config["exclude_modules"] = rf".*{re.escape(TOWER)}.*"
    write_atomically(folder / CONFIG, json.dumps(config, indent=1) + "\n")
    write_atomically(folder / BASE, json.dumps({"fingerprint": fingerprint}) + "\n")


def read(folder: Path, options: Lora, hf_config: Any, fingerprint: str) -> Lookup:
    """A lookup of the adapters in `folder` by HF name. Raises DataError if they are of another model, or others than
    `options` says."""
    try:
        config = {"use_rslora": False, "alpha_pattern": {}} | json.loads((folder / CONFIG).read_text())
        tensors = load_file(folder / TENSORS)
    except (OSError, ValueError, SafetensorError) as error:
        raise DataError(f"{folder} is no folder of adapters in PEFT's format: {error}") from None
    if (folder / BASE).is_file() and json.loads((folder / BASE).read_text())["fingerprint"] != fingerprint:
        raise DataError(f"the adapters in {folder} were trained on another model than the one given")
    if (start := str(config.get("init_lora_weights"))).startswith(CHANGING):
        why = f"{folder} has init_lora_weights {start}, which changed the model's own weights"
        raise DataError(f"{why}: convert it with PEFT (path_initial_model_for_weight_conversion)")
    for key, wanted in (options.peft() | {"alpha_pattern": {}}).items():
        written = config.get(key)
        written = sorted(written) if isinstance(written, list) else written
        if written != wanted and not isinstance(wanted, str):  # the tensors say it
            raise DataError(f"{folder} has {key} {written}, and this recipe's `lora` means {wanted}")
    expected = shapes(hf_config, options)
    own = {peft_name(name, hf_config): name for name in expected}
    adapters = {own.get(name, name.removeprefix(PREFIX)): tensor for name, tensor in tensors.items()}
    for name, shape in expected.items():
        if name not in adapters or adapters[name].shape != shape:
            what = f"has shape {tuple(adapters[name].shape)} instead of {shape}" if name in adapters else "is missing"
            raise DataError(f"the adapters in {folder} are not of this model: {name} {what}")
    if more := adapters.keys() - expected.keys():
        raise DataError(f"{folder} also has {min(more)}, which is no adapter of these options")
    return adapters.__getitem__


class Merged:
    """The weights of a model with its adapters, by HF name: W + s B A, added in fp32 and rounded once to `dtype`, by
    default that of W. `base`, `adapters`: lookups."""

    def __init__(self, base: Lookup, adapters: Lookup, options: Lora, dtype: torch.dtype | None = None):
        self.base, self.adapters, self.options, self.dtype = base, adapters, options, dtype

    def __call__(self, name: str) -> Tensor:
        weight = self.base(name)
        weight = weight.to(self.dtype or weight.dtype)
        if not has_adapter(name, self.options):
            return weight
        module = name.removesuffix(".weight")
        a, b = (self.adapters(f"{module}.lora_{part}.weight").float() for part in "AB")
        return (weight.float() + self.options.scale * (b @ a)).to(weight.dtype)
