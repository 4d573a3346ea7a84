"""Gives vLLM the token ids and the pixels of prompts as the trainer has them.

vLLM's own processor would read the images again, with torchvision, and write their tokens itself. In its place stands
one that only knows limits.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BatchFeature
from vllm import ModelRegistry
from vllm.inputs.engine import MultiModalInput, mm_input
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange
from vllm.multimodal.processing import BaseProcessingInfo

from megatron_rft.families.tables import family_of
from megatron_rft.inference.vllm import cpu_patches
from megatron_rft.megatron.images import runs


class ImageLimits(BaseProcessingInfo):
    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        return {"image": seq_len}


def replace_processor(config: Any) -> None:
    """Replace the processor of the model with this configuration."""
    name = family_of(config).architecture
    with cpu_patches.torchvision_stand_in():
        model = ModelRegistry.models[name].load_model_cls()
    ModelRegistry.register_model(name, model)  # else vLLM imports it again, in a process of its own
    MULTIMODAL_REGISTRY.register_processor(
        lambda info, dummy_inputs: SimpleNamespace(info=info, get_dummy_mm_inputs=lambda *_, **named: None),
        info=ImageLimits,
        dummy_inputs=lambda info: None,
    )(model)


def prompt(ids: Sequence[int], pictures: Any, config: Any, dtype: torch.dtype) -> MultiModalInput:
    """vLLM's prompt of `ids`, which have a run of image tokens for each of the `pictures`. Their digests are the
    keys of vLLM's caches. Raises DataError if the runs do not fit the pictures."""
    places, start, merge = [], 0, config.vision_config.spatial_merge_size
    for is_image, length in runs(torch.tensor(ids), pictures.grids, config.image_token_id, merge):
        places += [PlaceholderRange(start, length)] if is_image else []
        start += length
    grids = torch.tensor(pictures.grids)
    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", grids.prod(-1)),
        "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
    }
    inputs = BatchFeature({"pixel_values": pictures.pixels().to(dtype), "image_grid_thw": grids})
    items, keys = MultiModalKwargsItems.from_hf_inputs(inputs, fields), list(pictures.digests)
    return mm_input(list(ids), items, {"image": keys}, {"image": places})


def features(*of_prompt: Any) -> dict[str, Any]:
    """What a server gets beside the ids of a `prompt`."""
    from vllm.entrypoints.scale_out.token_in_token_out.mm_features import extract_mm_features

    return extract_mm_features(prompt(*of_prompt)).model_dump()


def mask(model: nn.Module, never: tuple[int, ...]) -> None:
    """Give the tokens `never` no probability: vLLM's options for that do not work with speculative decoding."""
    compute, never = partial(type(model).compute_logits, model), list(never)

    def compute_logits(*given: Any, **named: Any) -> Tensor | None:
        if (logits := compute(*given, **named)) is not None:
            logits[..., never] = -torch.inf
        return logits

    model.compute_logits = compute_logits
