"""An exponential moving average of a model's weights, in fp32 and host memory: the teacher of self-distillation.

A GPU updates it: a tensor comes from pinned memory, is averaged on the device, and goes back."""

from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor

from megatron_rft.megatron.actor import Actor
from megatron_rft.megatron.lora import sharded_state
from megatron_rft.megatron.weights import own_tensors


class MovingAverage:
    """Averages an actor's weights: each `update` sets w <- (1 - rate) w + rate * actor. `Actor.use_weights` takes
    `weights`."""

    def __init__(self, actor: Actor, rate: float):
        assert 0 < rate < 1, f"rate {rate}"
        self.actor, self.rate = actor, rate
        self.weights: list[Tensor] = [actor.pinned(copy.float()) for copy in actor.snapshot()]

    @torch.no_grad()
    def update(self) -> None:
        self.actor.finish_param_gather()
        for mean, parameter in zip(self.weights, self._parameters().values(), strict=True):
            here = mean.to(parameter.device, non_blocking=True)
            here.lerp_(parameter.float(), self.rate)
            if here is not mean:
                mean.copy_(here, non_blocking=True)
        if self.actor.device.type == "cuda":
            torch.cuda.synchronize()  # the host reads it next

    def sharded(self, prefix: str, metadata: dict[str, Any]) -> dict[str, Any]:
        """Return the model's sharded state for megatron's checkpoints, with the averages instead of the parameters."""
        chunks = enumerate(self.actor.models)
        whole = {f"{prefix}.{i}": sharded_state(chunk, f"{prefix}.", metadata) for i, chunk in chunks}
        pointers = (parameter.data_ptr() for parameter in self._parameters().values())
        mine = dict(zip(pointers, self.weights, strict=True))
        for entry in nested_values(whole):
            if isinstance(entry, ShardedTensor | ShardedTensorFactory):  # not Transformer Engine's extra states
                entry.data = mine[entry.data.data_ptr()]
                entry.dtype = torch.float32
        return whole

    def load(self, prefix: str, found: dict[str, Any]) -> None:
        """Load the averages from a checkpoint's `found` state, as saved by `sharded`."""
        for (index, name), mean in zip(self._parameters(), self.weights, strict=True):
            mean.copy_(found[f"{prefix}.{index}"][f"{prefix}.{name}"])

    def _parameters(self) -> dict[tuple[int, str], Tensor]:
        """Return the trained tensors by (chunk, name), in the order of `Actor.snapshot`."""
        named = ((i, name, p) for i, chunk in enumerate(self.actor.models) for name, p in own_tensors(chunk))
        return {(i, name): p for i, name, p in named if self.actor.lora is None or p.requires_grad}
