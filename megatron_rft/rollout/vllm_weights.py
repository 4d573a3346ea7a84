"""Weights into the model of a vLLM engine in this process, by vLLM's weight-transfer API, and read back out of it.

The two sides of the transfer are registered in vLLM's factories under the name HANDOVER: the worker pulls tensor by
tensor from the trainer's stream itself, so that no copy of the model stands beside the trainer's and the engine's.
Layers are processed (packed, quantised) by vLLM's own reloading as soon as their last tensor is there.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
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
    incomplete: list[str] = []  # what the last update did not write wholly

    def init_transfer_engine(self, init_info: Nothing) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Update) -> None:
        self.model.load_weights(update_info.tensors)

    def finish_weight_update(self) -> None:
        self.incomplete = list(unwritten(self.model))
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


def incomplete(engine: Any) -> str | None:
    """What the last update left unwritten in the engine."""
    names = engine.collective_rpc(lambda worker: worker.weight_transfer_engine.incomplete)[0]
    return f"the engine's {names[0]} was not wholly written ({len(names)} of its layers)" if names else None


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


def checksums(model: nn.Module) -> dict[str, int]:
    """HF name -> `checksum` of every parameter, -1 where copies of one differ. Collective, as `held` is."""
    found: dict[str, int] = {}
    for name, tensor in held(model):
        value = checksum(tensor)
        if found.setdefault(name, value) != value:
            found[name] = -1
    return found


@torch.inference_mode()
def held(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(HF name, tensor) of every parameter, whole, as the model computes with it. A matrix that was packed for its
    kernel is read through the kernel: its product with the identity.

    All tensor-parallel workers of the engine ask together. What is held more than once comes as often: a tied output
    matrix, again under its embedding's name; a norm, by each worker; heads of keys and values that workers share.
    """
    group = get_tp_group()
    for piece in pieces(model, group.world_size):
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


def pieces(model: nn.Module, workers: int) -> Iterator[Piece]:
    parts, tied = getattr(model, "packed_modules_mapping", {}), _tied(model)
    for path, layer in model.named_modules():
        own = path.rpartition(".")[2]
        for key, value in layer._parameters.items():
            if value is None:
                continue
            values = matrix(layer) if key == "weight" else value
            if isinstance(layer, VocabParallelEmbedding):
                name = "model.embed_tokens" if layer in tied else path
                yield Piece(f"{name}.{key}", values, rows=model.config.vocab_size)
            elif own in parts:
                names = [f"{path.removesuffix(own)}{part}.{key}" for part in parts[own]]
                shared = [1, *[layer.num_kv_head_replicas] * 2] if isinstance(layer, QKVParallelLinear) else [1, 1]
                for name, part, copies in zip(names, values.split(layer.output_partition_sizes), shared, strict=True):
                    yield Piece(name, part, copies=copies)
            elif isinstance(layer, RowParallelLinear) and key == "weight":
                yield Piece(f"{path}.{key}", values, dim=1)
            else:
                yield Piece(f"{path}.{key}", values, copies=1 if isinstance(layer, ColumnParallelLinear) else workers)


def matrix(layer: nn.Module) -> Tensor:
    """[out, in] a layer's weight as it is used: by the CPU build's kernel, where it has one and it is not looked up."""
    weight = layer.weight
    looked_up = isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead)
    if looked_up or not hasattr(layer, "cpu_linear"):
        return weight
    columns = layer.embedding_dim if isinstance(layer, ParallelLMHead) else layer.input_size_per_partition
    read = []
    for some in torch.arange(columns).split(COLUMNS):
        one_hot = torch.zeros(len(some), columns, dtype=weight.dtype)
        one_hot[torch.arange(len(some)), some] = 1
        read.append(layer.cpu_linear(one_hot, weight, None))
    return torch.cat(read).T
