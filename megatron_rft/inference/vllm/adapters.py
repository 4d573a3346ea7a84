"""Adapters beside a model that a vLLM engine keeps: vLLM's layers add B A x to W x themselves.

The engine gets W once and, with each sync, every A and s B. Each worker binds them to vLLM's LoRA layers and reads them
back layer by layer (`readback.py`): an adapter that is bound to nothing is an error. The engine has one adapter, and
all requests use it.
"""

from collections.abc import Iterable, Iterator
from typing import Any, get_args

import torch
from torch import Tensor
from vllm.config.lora import MaxLoRARanks
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.request import LoRARequest

from megatron_rft.config.lora import TARGETS, Lora
from megatron_rft.inference.vllm.readback import read_layer

ID = 1
REQUEST = LoRARequest("policy", ID, "sent by the trainer")


def arguments(options: Lora) -> dict[str, Any]:
    """Return vLLM's engine arguments."""
    modules = [module for target in options.targets for module in TARGETS[target]]
    rank = min(rank for rank in get_args(MaxLoRARanks) if rank >= options.rank)
    return {"enable_lora": True, "max_lora_rank": rank, "lora_target_modules": modules}


def set_aside(stream: Iterable[tuple[str, Tensor]], adapters: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Pass on the tensors of the model. Those of adapters go into `adapters`, in memory of their own."""
    for name, tensor in stream:
        if ".lora_" in name:
            adapters[name] = tensor.clone()
        else:
            yield name, tensor


def bind(worker: Any, tensors: dict[str, Tensor]) -> str | None:
    """Let the layers of a worker add these adapters, s included. Returns the problem, or None. Collective over the
    engine's workers."""
    manager = worker.model_runner.lora_manager
    dtype, device = manager.lora_config.lora_dtype, manager.device
    tensors = {name: tensor.to(device, dtype) for name, tensor in tensors.items()}
    rank = next(len(tensor) for name, tensor in tensors.items() if ".lora_A." in name)
    layers = {}
    for name, a in tensors.items():
        if ".lora_A." in name:
            path = name.removesuffix(".lora_A.weight")
            layers[path] = LoRALayerWeights(path, rank, rank, a, tensors[f"{path}.lora_B.weight"])
    manager.remove_all_adapters()
    manager._adapter_manager.add_adapter(LoRAModel(ID, rank, layers))
    manager._adapter_manager.activate_adapter(ID)
    model = worker.model_runner.model
    model.adapter_rank = rank
    bound = {
        name: tensor
        for path, layer in model.named_modules()
        if isinstance(layer, BaseLayerWithLoRA)
        for name, tensor in read_layer(model, path, layer)
    }
    wrong = [name for name, tensor in tensors.items() if name not in bound or not torch.equal(bound[name], tensor)]
    if wrong:
        what = "is bound to no layer of" if wrong[0] not in bound else "is not what was sent, in"
        return f"{wrong[0]} {what} the engine ({len(wrong)} of {len(tensors)} tensors)"
    return None
