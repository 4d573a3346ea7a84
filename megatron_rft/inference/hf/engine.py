"""Generates with a transformers model in this process, on the CPU or on one GPU, where vLLM is not installed.

It supports the families of `families`. The model's own forward computes everything.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.initialization import no_init_weights

from megatron_rft.families.checks import why_unsupported
from megatron_rft.families.shapes import hf_shapes
from megatron_rft.families.tables import FAMILIES
from megatron_rft.inference.engine import (
    Engine,
    EngineOptions,
    Group,
    Request,
    Sampling,
    WeightValidator,
    check_requests,
    checksum,
)
from megatron_rft.inference.hf.decoder import Decoder
from megatron_rft.inference.hf.routes import Routes
from megatron_rft.utils.errors import DataError, RunFailed

EXPERT_BIAS = "e_score_correction_bias"  # how the names of such buffers end


def builder(
    source: PreTrainedConfig | str | Path, dtype: torch.dtype, options: EngineOptions
) -> Callable[[torch.device | str], Engine]:
    return partial(HFEngine, source, dtype, max_batch_sequences=options.max_batch_sequences)


class HFEngine(Engine):
    """`source`: a configuration (weights must then be loaded before the first `generate`) or a folder with weights."""

    def __init__(
        self,
        source: PreTrainedConfig | str | Path,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        max_batch_sequences: int = 256,
    ):
        given = isinstance(source, PreTrainedConfig)
        config = copy.deepcopy(source) if given else AutoConfig.from_pretrained(source)  # the model changes its config
        check_family(config)
        if given:
            with no_init_weights():
                model = AutoModelForCausalLM.from_config(config, dtype=dtype)
            model.tie_weights()  # `no_init_weights` skips it
        else:
            model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
        self.dtype, self.device, self.max_batch_sequences = dtype, torch.device(device), max_batch_sequences
        self.model = model.eval().requires_grad_(False).to(self.device)
        for name, buffer in self.model.named_buffers():
            if name.endswith(EXPERT_BIAS):
                buffer.data = buffer.data.float()  # as the trainer and vLLM have it
        self.routes = Routes(self.model)
        self.weight_version = -1 if given else 0
        self.targets = hf_views(self.model)
        self.validator = WeightValidator(
            {name: target.shape for name, target in self.targets.items()}, config.model_type
        )
        if not given:
            self.validator.before = {name: (None, not target.any()) for name, target in self.targets.items()}

    @torch.inference_mode()
    def generate(self, requests: list[Request], sampling: Sampling) -> Iterator[Group]:
        if self.weight_version < 0:
            raise RunFailed("generation was asked for before any weights were loaded")
        config = self.model.config
        positions = config.max_position_embeddings
        room = f"the model has {positions} positions (max_position_embeddings)"
        check_requests(requests, sampling, positions, room, config.vocab_size)
        routes = self.routes if sampling.routes else None
        decoder = Decoder(
            self.model, sampling, self.max_batch_sequences, lambda: self.weight_version, self.on_step, routes
        )
        yield from decoder.run(requests)

    @torch.no_grad()
    def load_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy each tensor from the stream into the model. After a problem the stream is still read to its end, because
        it runs collectives; then the first problem is raised, and `generate` refuses to run."""
        self.weight_version = -1
        for name, tensor in self.validator.checked(stream):
            self.targets[name].copy_(tensor)
        if problem := self.validator.problem():
            raise RunFailed(f"weights of version {version}: {problem}")
        self.validator.accept()
        self.weight_version = version

    def checksums(self) -> dict[str, int]:
        return {name: checksum(tensor) for name, tensor in self.targets.items()}

    def sleep(self) -> None:
        self._to(torch.device("cpu"))

    def wake(self, cache: bool = True) -> None:
        self._to(self.device)

    def _to(self, device: torch.device) -> None:
        if self.device.type != "cpu":
            self.model.to(device)
            self.targets = hf_views(self.model)
            torch.cuda.empty_cache()

    def close(self) -> None:
        self.model, self.routes, self.targets, self.weight_version = None, None, {}, -1


def check_family(config: PreTrainedConfig) -> None:
    """Refuse models of other families, whose logits may not be the output matrix times the last hidden state, and what
    the trainer refuses."""
    if config.model_type not in FAMILIES:
        raise DataError(f"the hf engine generates with {', '.join(FAMILIES)}, not with {config.model_type!r}")
    if refused := why_unsupported(config):
        raise DataError(refused)


def hf_views(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return views of the model's parameters by HF checkpoint name. transformers stores a layer's experts in two
    tensors, gate_up_proj [E, 2I, H] and down_proj [E, H, I]; checkpoints have three tensors for each expert."""
    views = {}
    whole = hf_shapes(model.config)  # some families' checkpoints have the two tensors as well
    for name, parameter in model.named_parameters():  # a tied lm_head is not listed again
        experts = name.removesuffix("gate_up_proj").removesuffix("down_proj")
        if name in whole:
            views[name] = parameter.data
        elif name.endswith("experts.gate_up_proj"):
            for e, (gate, up) in enumerate(expert.chunk(2) for expert in parameter.data):
                views |= {f"{experts}{e}.gate_proj.weight": gate, f"{experts}{e}.up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            views |= {f"{experts}{e}.down_proj.weight": down for e, down in enumerate(parameter.data)}
        else:
            views[name] = parameter.data
    views |= {name: bias.data for name, bias in model.named_buffers() if name.endswith(EXPERT_BIAS)}
    return {name if name in whole else _mixtral(name): view for name, view in views.items()}


def _mixtral(name: str) -> str:
    """A checkpoint's name of a tensor of Mixtral's kind of experts, which transformers names like the others'."""
    for ours, on_disk in {".mlp.": ".block_sparse_moe.", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}.items():
        name = name.replace(ours, on_disk)
    return name
