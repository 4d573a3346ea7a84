"""Weights into the model of a vLLM engine in this process, by vLLM's weight-transfer API, and read back out of it.

The two sides of the transfer are registered in vLLM's factories under the name HANDOVER: the worker pulls tensor by
tensor from the trainer's stream itself, so that no copy of the model stands beside the trainer's and the engine's.
Layers are processed (packed, quantised) by vLLM's own reloading as soon as their last tensor is there.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from vllm.distributed import get_tp_group
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightSource,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
from vllm.model_executor.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from megatron_rft.rollout import vllm_cpu
from megatron_rft.rollout.engine import checksum
from megatron_rft.rollout.vllm_quantised import Comparison, rounds

HANDOVER = "handover"
COLUMNS = 256  # of a packed matrix that are read back at a time


class Stream(WeightSource):
    """A stream of HF-named tensors as vLLM's WeightSource. Each sync sets the next stream."""

    def __init__(self, metadata: list[ParamMeta]):
        self._metadata, self.tensors = metadata, iter(())

    def metadata(self) -> list[ParamMeta]:
        return self._metadata

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.tensors)


@dataclass
class Nothing(WeightTransferInitInfo):
    pass


@dataclass
class Update(WeightTransferUpdateInfo):
    tensors: Iterable[tuple[str, Tensor]]


class Receiver(WeightTransferEngine[Nothing, Update]):
    """The worker's side."""

    init_info_cls, update_info_cls = Nothing, Update
    supports_draft_weight_update = False
    problems: list[str | None] = []  # with the last update

    def init_transfer_engine(self, init_info: Nothing) -> None:
        pass

    @property
    def problem(self) -> str | None:
        return next(filter(None, self.problems), None)

    def start_weight_update(self) -> None:
        self.problems = []
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Update) -> None:
        self.load(update_info.tensors)

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self.comparison = Comparison(self.model, partial(made_of, self.model), partial(held_by, self.model))
        self.model.load_weights(self.comparison.watch(tensors))

    def finish_weight_update(self) -> None:
        if names := list(unwritten(self.model)):
            self.problems.append(f"the engine's {names[0]} was not wholly written ({len(names)} of its layers)")
        self.problems.append(self.comparison.end())
        self.model.read_back = self.comparison.read_back
        finalize_layerwise_reload(self.model, self.model_config)
        if vllm_cpu.faulty():
            vllm_cpu.after_reload(self.model)

    def shutdown(self) -> None:
        pass


@dataclass
class SenderInit(TrainerInitInfo):
    backend: ClassVar[str] = HANDOVER


class Sender(TrainerWeightTransferEngine[SenderInit]):
    """The trainer's side."""

    init_info_cls = SenderInit

    @classmethod
    def trainer_init(cls, init_info: SenderInit, *, client: Any, source: WeightSource | None = None) -> "Sender":
        client.init_weight_transfer_engine({})
        return cls(client=client, source=source)

    def send_weights(self) -> None:
        self.client.start_weight_update()
        self.client.update_weights({"tensors": self.source})
        self.client.finish_weight_update()


class InProcess:
    """vLLM's VLLMWeightSyncClient over an LLMEngine in this process."""

    def __init__(self, engine: Any):
        self.engine = engine

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.engine.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": init_info})

    def start_weight_update(self) -> None:
        self.engine.collective_rpc("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.engine.collective_rpc("update_weights", kwargs={"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.engine.collective_rpc("finish_weight_update")
        if weight_version is not None:
            self.engine.set_weight_version(weight_version)


def register() -> None:
    """In vLLM's factories, once a process."""
    if HANDOVER not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(HANDOVER, Receiver)
        WeightTransferTrainerFactory.register_engine(HANDOVER, Sender)


def connect(engine: Any, source: WeightSource) -> TrainerWeightTransferEngine:
    return WeightTransferTrainerFactory.trainer_init(SenderInit(rank=0), client=InProcess(engine), source=source)


def problem(engine: Any) -> str | None:
    """With what the last update made of a sound stream."""
    return engine.collective_rpc(lambda worker: worker.weight_transfer_engine.problem)[0]


def unwritten(model: nn.Module) -> Iterator[str]:
    """Parameters of the model under reload that were not written element by element. Every layer that is complete has
    been processed by now; what vLLM pads a vocabulary with, and a tied output matrix, are never written."""
    tied = _tied(model)
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        parameters = [key for key, value in layer._parameters.items() if value is not None]
        if not info.can_load() or not parameters or layer in tied:
            continue
        if info.load_numel != info.load_numel_total - _padding(layer):
            yield f"{name}.{parameters[0]}"


def _padding(layer: nn.Module) -> int:
    """Elements of a vocabulary's matrix beyond the vocabulary."""
    if not isinstance(layer, VocabParallelEmbedding):
        return 0
    rows = layer.shard_indices
    return (rows.num_elements_padded - rows.num_org_elements - rows.num_added_elements) * layer.embedding_dim


def _tied(model: nn.Module) -> list[nn.Module]:
    return [model.lm_head] if getattr(model.config, "tie_word_embeddings", False) and hasattr(model, "lm_head") else []


# --- reading back


def checksums(model: nn.Module) -> dict[str, int | None]:
    """HF name -> `checksum` of every parameter, -1 where copies of one differ. None: it is rounded, was compared with
    what came when that was loaded, and has not changed since. Collective, as `held` is."""
    found: dict[str, int | None] = {}
    for name, tensor in held(model):
        value = checksum(tensor)
        value = None if value in model.read_back.get(name, ()) else value
        if found.setdefault(name, value) != value:
            found[name] = -1
    return found


@torch.inference_mode()
def held(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(HF name, tensor) of every parameter, whole, as the model computes with it. A matrix that was packed or rounded
    for its kernel is read through the kernel: its product with the identity.

    All tensor-parallel workers of the engine ask together. What is held more than once comes as often: a tied output
    matrix, again under its embedding's name; a norm, by each worker; heads of keys and values that workers share.
    """
    for path, layer in model.named_modules():
        yield from held_by(model, path, layer)


@torch.inference_mode()
def held_by(model: nn.Module, path: str, layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """`held`, of one layer."""
    group = get_tp_group()
    for piece in pieces(model, path, layer, group.world_size):
        everyone = [torch.empty(piece.values.shape).to(piece.values) for _ in range(group.world_size)]
        dist.all_gather(everyone, piece.values.contiguous(), group=group.device_group)
        for copy in range(piece.copies):
            yield piece.name, torch.cat(everyone[copy :: piece.copies], piece.dim)[: piece.rows]


@dataclass
class Piece:
    """This worker's of a parameter. `copies` workers in a row have the same one; theirs and those of the others, joined
    in dimension `dim`, are the parameter and, beyond `rows`, padding."""

    name: str  # HF's
    values: Tensor
    dim: int = 0
    copies: int = 1
    rows: int | None = None


def pieces(model: nn.Module, path: str, layer: nn.Module, workers: int) -> Iterator[Piece]:
    for key in parameters(layer):
        values = matrix(layer) if key == "weight" else layer._parameters[key]
        names = hf_names(model, path, key)
        if isinstance(layer, VocabParallelEmbedding):
            name = "model.embed_tokens" if layer in _tied(model) else path
            yield Piece(f"{name}.{key}", values, rows=model.config.vocab_size)
        elif len(names) > 1:
            shared = [1, *[layer.num_kv_head_replicas] * 2] if isinstance(layer, QKVParallelLinear) else [1, 1]
            for name, part, copies in zip(names, values.split(layer.output_partition_sizes), shared, strict=True):
                yield Piece(name, part, copies=copies)
        elif isinstance(layer, RowParallelLinear) and key == "weight":
            yield Piece(names[0], values, dim=1)
        else:
            yield Piece(names[0], values, copies=1 if isinstance(layer, ColumnParallelLinear) else workers)


def parameters(layer: nn.Module) -> list[str]:
    """Names of a layer's own. A layer that rounds has scales as well."""
    there = [key for key, value in layer._parameters.items() if value is not None]
    return [key for key in there if key in ("weight", "bias")] if rounds(layer) else there


def hf_names(model: nn.Module, path: str, key: str) -> list[str]:
    """Of what a parameter of vLLM is made of."""
    own = path.rpartition(".")[2]
    parts = getattr(model, "packed_modules_mapping", {}).get(own, [own])
    return [f"{path.removesuffix(own)}{part}.{key}" for part in parts]


def made_of(model: nn.Module, path: str, layer: nn.Module) -> list[str]:
    return [name for key in parameters(layer) for name in hf_names(model, path, key)]


def matrix(layer: nn.Module) -> Tensor:
    """[out, in] a layer's weight as it is used: by the kernel, where that has packed or rounded it."""
    weight = layer.weight
    looked_up = isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead)
    if rounds(layer):
        dtype, product = layer.params_dtype, partial(layer.quant_method.apply, layer)
    elif looked_up or not hasattr(layer, "cpu_linear"):
        return weight
    else:
        dtype, product = weight.dtype, partial(layer.cpu_linear, weight=weight, bias=None)
    columns = layer.embedding_dim if isinstance(layer, ParallelLMHead) else layer.input_size_per_partition
    read = []
    for some in torch.arange(columns).split(COLUMNS):
        one_hot = torch.zeros(len(some), columns, dtype=dtype, device=weight.device)
        one_hot[torch.arange(len(some)), some] = 1
        read.append(product(one_hot))
    return torch.cat(read).T
