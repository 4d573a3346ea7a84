"""Runs in the workers of a vLLM server: receives weights from a trainer, and reports checksums of them.

A server is started with this file's `Extension` (`arguments.command` builds the command line). Importing this module
registers the receiving side in vLLM's weight-transfer factory, under the name WIRE.
"""

import os
from dataclasses import dataclass

from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from megatron_rft.config.vllm import installed
from megatron_rft.conversion.folder import language_config
from megatron_rft.families.shapes import hf_shapes
from megatron_rft.families.towers import never_sampled, sees
from megatron_rft.inference.engine import WeightValidator
from megatron_rft.inference.transport import network
from megatron_rft.inference.transport.shared_memory import local_gpu
from megatron_rft.inference.vllm import cpu_patches, draft_models, images
from megatron_rft.inference.vllm.readback import checksums
from megatron_rft.inference.vllm.server_checks import MODEL
from megatron_rft.inference.vllm.weights import Receiver, register
from megatron_rft.utils.end_with_parent import shared_memory
from megatron_rft.utils.files import record_shared_memory
from megatron_rft.utils.network_interface import name_for_gloo
from megatron_rft.utils.position import write_engine_stacks

WIRE = "wire"


@dataclass
class Address(WeightTransferInitInfo):
    host: str
    port: int
    size: int
    timeout_s: float
    transport: str
    secret: str


class WireReceiver(Receiver):
    init_info_cls, update_info_cls = Address, WeightTransferUpdateInfo
    link: network.Link | None = None

    def init_transfer_engine(self, init_info: Address) -> None:
        parallel = self.parallel_config
        rank = 1 + parallel.data_parallel_index * parallel.world_size + parallel.rank
        config = language_config(self.model_config.hf_config)
        self.validator = WeightValidator(hf_shapes(config), config.model_type)
        self.shutdown()  # closes the link to an earlier trainer
        device = self.device if init_info.transport == network.GPU else None
        size, limit_s = init_info.size, init_info.timeout_s
        name_for_gloo(init_info.host)
        store = network.rendezvous(init_info.host, size, limit_s, init_info.port)
        self.link = network.connect(store, rank, size, limit_s, device, init_info.secret)

    def shutdown(self) -> None:
        if self.link is not None:
            self.link.close()
        self.link = None

    def receive_weights(self, update_info: WeightTransferUpdateInfo) -> None:
        stream, failure = self.validator.checked(network.receive(self.link)), None
        try:
            self.load(stream)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        for _ in stream:  # the trainer always sends the whole stream
            pass
        self.problem = self.validator.end() or failure


write_engine_stacks()
register(WIRE, WireReceiver)
draft_models.load_from_their_folder()


class Extension:
    """The methods that a trainer calls on each worker through `/collective_rpc`."""

    def rft_facts(self) -> dict:
        record_shared_memory(shared_memory(os.getpid()))
        cpu_patches.repair()
        if self._weight_update_active:  # its trainer was lost in the middle, and vLLM begins no other before its end
            self.finish_weight_update()
        config, parallel = language_config(self.model_config.hf_config), self.parallel_config
        if sees(config):
            images.mask(self.model_runner.model, never_sampled(config))
        transfer, scheduler = self.vllm_config.weight_transfer_config, self.scheduler_config
        facts = {name: getattr(config, name) for name in MODEL} | {"vllm": installed()[1]}
        facts |= {"transfer": transfer and transfer.backend, "logprobs_mode": self.model_config.logprobs_mode}
        facts |= {"chunked_prefill": scheduler.enable_chunked_prefill, "sequences": scheduler.max_num_seqs}
        facts |= {"dtype": str(self.model_config.dtype), "max_model_len": self.model_config.max_model_len}
        facts |= {"prefix_caching": bool(self.cache_config.enable_prefix_caching), "gpu": local_gpu()}
        facts |= {"quantization": self.model_config.quantization, "kv_cache_dtype": self.cache_config.cache_dtype}
        return facts | {"workers": parallel.world_size, "replicas": parallel.data_parallel_size}

    def rft_problem(self) -> dict:
        return {"problem": self.weight_transfer_engine.problem}

    def rft_checksums(self) -> dict:
        """Return the checksums by HF name, as text because JSON's numbers have 53 bits. All workers return the same."""
        found = checksums(self.model_runner.model, self.model_runner.dtype)
        return {name: None if value is None else str(value) for name, value in found.items()}
