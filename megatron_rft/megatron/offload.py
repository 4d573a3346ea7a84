"""Training state in host memory while an engine on the same device generates.

Gradients are dropped, for every step begins with zeros; the optimizer's state is copied, to pinned memory beside a GPU.
Tensors stay what they are: their storages are empty meanwhile, and then hold the same bits again.
"""

from typing import Any

import torch
from torch import Tensor, UntypedStorage

from megatron_rft.megatron import seams
from megatron_rft.megatron.optimizer import ActorOptimizer


def drop_fp8_copies(chunks: list[Any]) -> None:
    """Free the copies of weights that Transformer Engine's layers keep from one pass to the next, which renews them."""
    for module in (module for chunk in chunks for module in chunk.modules()):
        getattr(module, "_fp8_workspaces", {}).clear()


class TrainingState:
    """Gradients and optimizer state of DDP-wrapped model chunks, on their device or in host memory."""

    def __init__(self, chunks: list[Any], optimizer: ActorOptimizer):
        self.chunks, self.optimizer = chunks, optimizer
        self.away: list[tuple[UntypedStorage, int, list[Tensor] | None]] = []
        self.copies: dict[int, list[Tensor]] = {}  # by storage; kept, because pinning memory takes long

    def offload(self) -> None:
        """Frees the device's memory. Nothing may use gradients or the optimizer until `restore`."""
        if self.away:
            return
        drop_fp8_copies(self.chunks)
        storages = self._optimizer_storages()
        self.copies = {storage._cdata: seams.now.save(storage, self.copies.get(storage._cdata)) for storage in storages}
        self.away = [(storage, storage.nbytes(), self.copies[storage._cdata]) for storage in storages]
        buffers = [each for chunk in self.chunks for each in chunk.buffers + chunk.expert_parallel_buffers]
        gradients = [buffer.grad_data.untyped_storage() for buffer in buffers]
        self.away += [(storage, storage.nbytes(), None) for storage in gradients]
        if any(storage.device.type == "cuda" for storage, *_ in self.away):
            torch.cuda.synchronize()
        for storage, *_ in self.away:
            seams.now.empty(storage)

    def restore(self) -> None:
        for storage, size, copy in self.away:
            seams.now.refill(storage, size, copy)
        self.away = []

    def _optimizer_storages(self) -> list[UntypedStorage]:
        """Of the fp32 parameters and of all sets of moments. In fp32 those parameters are the model's own, which stay;
        and what an optimizer keeps on the host is there already."""
        own = {p.untyped_storage()._cdata for chunk in self.chunks for p in chunk.parameters()}
        device = next(self.chunks[0].parameters()).device
        beside = (x.untyped_storage() for x in self.optimizer.tensors() if x.device == device)
        found = {storage._cdata: storage for storage in beside if storage.nbytes()}
        return [storage for key, storage in found.items() if key not in own]
