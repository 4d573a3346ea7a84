"""Generates with a transformers model in this process, on the CPU or on one GPU, where vLLM is not installed.

It supports the families of `families`: the logits of others may not be the output matrix times the last hidden state.
The model's own forward computes everything.
"""

from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig
from transformers.initialization import no_init_weights

from megatron_rft.conversion.folder import whole_config
from megatron_rft.families.checks import why_unsupported
from megatron_rft.families.shapes import hf_shapes
from megatron_rft.families.tables import family_of
from megatron_rft.families.towers import never_sampled, sees
from megatron_rft.inference import engine
from megatron_rft.inference.hf import attention
from megatron_rft.inference.hf.decoder import Decoder
from megatron_rft.inference.hf.routes import Routes
from megatron_rft.utils.errors import DataError, RunFailed

EXPERT_BIAS = "e_score_correction_bias"  # how the names of such buffers end


def builder(config: PreTrainedConfig, dtype: torch.dtype, options: engine.EngineOptions) -> engine.EngineBuild:
    return partial(HFEngine, config, dtype, max_batch_sequences=options.max_batch_sequences)


class HFEngine(engine.Engine):
    def __init__(
        self,
        config: PreTrainedConfig,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        max_batch_sequences: int = 256,
    ):
        if refused := why_unsupported(config):
            raise DataError(refused)
        kind = AutoModelForImageTextToText if sees(config) else AutoModelForCausalLM
        with no_init_weights():
            model = kind.from_config(whole_config(config), dtype=dtype)  # it changes its configuration
        model.tie_weights()  # `no_init_weights` skips it
        if model.config._attn_implementation == "sdpa":
            model.set_attn_implementation(attention.NAME)
        self.dtype, self.device, self.max_batch_sequences = dtype, torch.device(device), max_batch_sequences
        self.model = model.eval().requires_grad_(False).to(self.device)
        for name, buffer in self.model.named_buffers():
            if name.endswith(EXPERT_BIAS):
                buffer.data = buffer.data.float()  # as the trainer and vLLM have it
        self.routes = Routes(self.model)
        self.weight_version = -1
        self.config, self.never = config, never_sampled(config)
        ours = self.device.type == "cpu" and not self.never and model.config._attn_implementation == attention.NAME
        self.takes_bias = ours and attention.takes_bias(model.config, dtype)
        self.targets = hf_views(self.model, config)
        shapes = {name: target.shape for name, target in self.targets.items()}
        self.validator = engine.WeightValidator(shapes, config.model_type)

    @torch.inference_mode()
    def generate(self, requests: list[engine.Request], sampling: engine.Sampling) -> Iterator[engine.Group]:
        if self.weight_version < 0:
            raise RunFailed("generation was asked for before any weights were loaded")
        config = self.config
        positions = config.max_position_embeddings
        room = f"the model has {positions} positions (max_position_embeddings)"
        engine.check_requests(requests, sampling, positions, room, config.vocab_size)
        yield from Decoder(self, sampling).run(requests)

    @torch.no_grad()
    def load_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy each tensor from the stream into the model. After a problem the stream is still read to its end, because
        it runs collectives; then the first problem is raised, and `generate` refuses to run."""
        self.weight_version = -1
        for name, tensor in self.validator.checked(stream):
            self.targets[name].copy_(tensor)
        if problem := self.validator.end():
            raise RunFailed(f"weights of version {version}: {problem}")
        self.weight_version = version

    def checksums(self) -> dict[str, int]:
        return {name: engine.checksum(tensor.to(self.dtype)) for name, tensor in self.targets.items()}

    def sleep(self) -> None:
        self._to(torch.device("cpu"))

    def wake(self, cache: bool = True) -> None:
        self._to(self.device)

    def _to(self, device: torch.device) -> None:
        if self.device.type != "cpu":
            self.model.to(device)
            self.targets = hf_views(self.model, self.config)
            torch.cuda.empty_cache()

    def close(self) -> None:
        self.model, self.routes, self.targets, self.weight_version = None, None, {}, -1


def hf_views(model: torch.nn.Module, config: PreTrainedConfig) -> dict[str, Tensor]:
    """Return views of the model's parameters by HF checkpoint name. transformers stores a layer's experts in two
    tensors, gate_up_proj [E, 2I, H] and down_proj [E, H, I]; checkpoints have three tensors for each expert."""
    views = {}
    whole = hf_shapes(config)  # some families' checkpoints have the two tensors as well
    family = family_of(config)
    for name, parameter in model.named_parameters():  # a tied lm_head is not listed again
        if family.tower:
            name = name.replace("model.visual.", family.tower).replace("model.language_model.", family.prefix)
        layer, _, part = name.rpartition(".")
        if name in whole or not layer.endswith("experts"):
            transposed = family.tower and layer.endswith("experts")  # on disk
            views[name] = parameter.data.mT if transposed else parameter.data
        elif part == "gate_up_proj":
            for e, (gate, up) in enumerate(expert.chunk(2) for expert in parameter.data):
                views |= {f"{layer}.{e}.gate_proj.weight": gate, f"{layer}.{e}.up_proj.weight": up}
        else:
            views |= {f"{layer}.{e}.down_proj.weight": down for e, down in enumerate(parameter.data)}
    views |= {name: bias.data for name, bias in model.named_buffers() if name.endswith(EXPERT_BIAS)}
    return {name if name in whole else _mixtral(name): view for name, view in views.items()}


def _mixtral(name: str) -> str:
    """A checkpoint's name of a tensor of Mixtral's kind of experts, which transformers names like the others'."""
    for ours, on_disk in {".mlp.": ".block_sparse_moe.", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}.items():
        name = name.replace(ours, on_disk)
    return name
