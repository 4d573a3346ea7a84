"""Vision towers: transformers' module on the first pipeline stage, before the language model's layers.

Every tensor- and context-parallel rank computes the whole tower, and takes the features of its own tokens. So a tower's
gradients are added up over ranks like those of a norm.
"""

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from transformers import AutoModel
from transformers.initialization import no_init_weights

from megatron_rft.families.checks import rope
from megatron_rft.families.towers import deep_layers
from megatron_rft.megatron import parallel
from megatron_rft.megatron.images import Seen
from megatron_rft.utils.errors import ConfigError


def rotary_axes(hf_config: Any) -> Tensor:
    """[d / 2] the axis (0 time, 1 height, 2 width) of each frequency: in sections, or interleaved t h w t h w ... t."""
    found = rope(hf_config)
    t, h, w = found["mrope_section"]
    if not deep_layers(hf_config):
        return torch.tensor([0] * t + [1] * h + [2] * w)
    axes = torch.zeros(t + h + w, dtype=torch.long)
    axes[1 : 3 * h : 3], axes[2 : 3 * w : 3] = 1, 2
    return axes


def attach(model: GPTModel, hf_config: Any, trained: bool) -> None:
    """Give the first chunk of a pipeline its tower, `visual`, without weights."""
    if not model.pre_process:
        return
    deep, config = deep_layers(hf_config), model.config
    if len(model.decoder.layers) < deep:
        raise ConfigError(
            f"the tower's features enter the first {deep} layers, and the first pipeline stage has only "
            f"{len(model.decoder.layers)}: use fewer stages (megatron.pipeline_model_parallel_size, "
            "megatron.virtual_pipeline_model_parallel_size)"
        )
    with no_init_weights():
        tower = AutoModel.from_config(hf_config.vision_config, dtype=config.params_dtype)
    model.__class__, model.visual = SeeingModel, tower.to(parallel.device()).requires_grad_(trained)
    for parameter in tower.parameters():  # each rank has the gradient of its own tokens
        parameter.sequence_parallel = config.sequence_parallel
    for module in tower.modules():  # frequencies, which a model of lower precision would round
        for name in list(module._buffers):
            setattr(module, name, module._buffers.pop(name).clone())
    for layer in model.decoder.layers[:deep]:
        layer.register_forward_hook(_add_deep, with_kwargs=True)


class SeeingModel(GPTModel):
    """The first stage of a model with a vision tower."""

    visual: torch.nn.Module

    def forward(self, input_ids: Tensor, position_ids, attention_mask, *, packed_seq_params: Any = None, **options):
        options["decoder_input"] = self._embed(input_ids, getattr(packed_seq_params, "seen", None))
        return super().forward(input_ids, position_ids, attention_mask, packed_seq_params=packed_seq_params, **options)

    def _embed(self, ids: Tensor, seen: Seen | None) -> Tensor:
        """[T, 1, H], or this rank's part of T with sequence parallelism: embeddings, and features of images."""
        words = self.embedding(input_ids=ids, position_ids=None)
        learns = self.training and torch.is_grad_enabled()
        trains = learns and any(each.requires_grad for each in self.visual.parameters())
        if seen is None and not trains:
            return words
        pixels, grids = self._blank() if seen is None else (seen.pixels, seen.grids)
        with torch.set_grad_enabled(trains):
            found = self.visual(pixels.to(words.device, self.visual.dtype), grid_thw=grids.to(words.device))
        features, deep = found.pooler_output, list(getattr(found, "deepstack_features", None) or ())
        if seen is None:  # DDP waits for a gradient of every parameter
            return words + sum(each.sum() for each in (features, *deep)) * 0
        cells, numbers = self._own(seen, len(words))
        words = words.index_put((cells, torch.zeros_like(cells)), features[numbers].to(words.dtype))
        own = [each[numbers].to(words.dtype) for each in deep]
        copies = [each.detach().requires_grad_(trains) for each in own]
        seen.deep = tuple((cells, each) for each in copies)
        return ReturnGradients.apply(words, copies, *own) if trains else words

    def _own(self, seen: Seen, length: int) -> tuple[Tensor, Tensor]:
        """Of the image tokens and their features, those that this tensor-parallel rank has among its `length`."""
        if not self.config.sequence_parallel:
            return seen.cells, seen.features
        mine = seen.cells // length == parallel.tp_rank()
        return seen.cells[mine] % length, seen.features[mine]

    def _blank(self) -> tuple[Tensor, Tensor]:
        """The pixels and the grid of a small image."""
        c, side = self.visual.config, 2 * self.visual.spatial_merge_size
        values = c.in_channels * c.temporal_patch_size * c.patch_size**2
        return torch.zeros(side * side, values), torch.tensor([[1, side, side]])


class ReturnGradients(torch.autograd.Function):
    """Passes `words` on. Layers add `copies` of deep features, apart from the tower's graph, because a recomputed layer
    differentiates all that it reaches. The backward pass comes here after all layers, and returns to `deep` what the
    copies have gathered."""

    @staticmethod
    def forward(ctx, words: Tensor, copies: list[Tensor], *deep: Tensor) -> Tensor:
        ctx.copies = copies
        return words.view_as(words)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None, *(torch.zeros_like(each) if each.grad is None else each.grad for each in ctx.copies)


def _add_deep(layer: Any, _inputs: Any, options: dict[str, Any], out: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    """Add the tower's features of this layer to its output (Qwen3-VL's deepstack)."""
    seen, number = getattr(options.get("packed_seq_params"), "seen", None), layer.layer_number - 1
    if seen is None:
        return out
    cells, features = seen.deep[number]
    return out[0].index_put((cells, torch.zeros_like(cells)), features, accumulate=True), *out[1:]
