"""Loads weights into the model of a vLLM engine in this process, through vLLM's weight-transfer API.

The worker's side is registered in vLLM's factory under the name HANDOVER. The worker pulls tensors from the trainer's
stream one at a time, so that there is no third copy of the model. vLLM's reloading processes a layer (packs, quantises)
as soon as its last tensor has arrived.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from megatron_rft.inference.vllm import cpu_patches
from megatron_rft.inference.vllm.fp8 import Comparison
from megatron_rft.inference.vllm.readback import tied

HANDOVER = "handover"


@dataclass
class TensorUpdate(WeightTransferUpdateInfo):
    tensors: Iterable[tuple[str, Tensor]]


class Receiver(WeightTransferEngine[WeightTransferInitInfo, TensorUpdate]):
    """The worker's side of the transfer."""

    init_info_cls, update_info_cls = WeightTransferInitInfo, TensorUpdate
    supports_draft_weight_update = False
    problem: str | None = None  # the first one of the last update

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        self.problem = None
        if cpu_patches.faulty():
            cpu_patches.before_reload(self.model)
        for parameter in self.model.parameters():  # reloading asks for names, which MiniMax-M2's norms have none of
            if isinstance(loader := getattr(parameter, "weight_loader", None), partial):
                loader.__name__ = "weight_loader"  # pyright: ignore[reportAttributeAccessIssue]
        initialize_layerwise_reload(self.model)
        self.comparison = Comparison(self.model)

    def receive_weights(self, update_info: TensorUpdate) -> None:
        self.load(update_info.tensors)

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self.model.load_weights(self.comparison.watch(tensors))

    def finish_weight_update(self) -> None:
        if (names := list(unwritten(self.model))) and not self.problem:
            self.problem = f"the engine's {names[0]} was not wholly written ({len(names)} of its layers)"
        self.problem = self.problem or self.comparison.end()
        self.model.read_back = self.comparison.read_back
        finalize_layerwise_reload(self.model, self.model_config)
        if cpu_patches.faulty():
            cpu_patches.after_reload(self.model)

    def shutdown(self) -> None:
        pass


def register(name: str = HANDOVER, receiver: type[Receiver] = Receiver) -> None:
    """Register the worker's side in vLLM's factory, once per process."""
    if name not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(name, receiver)


def send(engine: Any, tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """Have the worker of an LLMEngine in this process load all of `tensors`, which have HF names. Returns the worker's
    problem with them, or None."""
    engine.collective_rpc("start_weight_update")
    engine.collective_rpc("update_weights", kwargs={"update_info": {"tensors": tensors}})
    engine.collective_rpc("finish_weight_update")
    return engine.collective_rpc(lambda worker: worker.weight_transfer_engine.problem)[0]


def unwritten(model: nn.Module) -> Iterator[str]:
    """Yield the parameters that the reload has not written completely. vLLM has already processed complete layers. It
    never writes the padding of a vocabulary and a tied output matrix."""
    alias = tied(model)
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        parameters = [key for key, value in layer._parameters.items() if value is not None]
        if not info.can_load() or not parameters or layer in alias:
            continue
        if info.load_numel != info.load_numel_total - _padding(layer):
            yield f"{name}.{parameters[0]}"


def _padding(layer: nn.Module) -> int:
    """Return the number of padding elements of an embedding or output matrix."""
    if not isinstance(layer, VocabParallelEmbedding):
        return 0
    rows = layer.shard_indices
    return (rows.num_elements_padded - rows.num_org_elements - rows.num_added_elements) * layer.embedding_dim
