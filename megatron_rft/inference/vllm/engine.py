"""Generates with vLLM in this process, on the CPU or on this rank's GPU.

The engine starts without weights and receives them from the trainer's stream. Each response is a separate vLLM request
with a seed that depends on (request seed, sample); vLLM's prefix cache computes a shared prompt once.
"""

import math
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedConfig

from megatron_rft.conversion import hf_shapes
from megatron_rft.families.towers import TOWER, never_sampled
from megatron_rft.inference import engine
from megatron_rft.inference.acceptance import COUNTERS, Acceptance
from megatron_rft.inference.vllm import arguments, cpu_patches
from megatron_rft.plan.devices import GIB
from megatron_rft.plan.vllm import GPU_SHARE, room_for_cache
from megatron_rft.records import Response
from megatron_rft.utils.asleep import asleep
from megatron_rft.utils.end_with_parent import shared_memory
from megatron_rft.utils.errors import ConfigError, RunFailed
from megatron_rft.utils.files import record_shared_memory
from megatron_rft.utils.position import here

PARTS = ("weights", "kv_cache")  # vLLM's names of what sleeps
STEPPING = Lock()  # only one engine of this process runs a step at a time


def builder(config: PreTrainedConfig, dtype: torch.dtype, options: engine.EngineOptions) -> engine.EngineBuild:
    return partial(VLLMEngine, config, dtype, **vars(options))


class VLLMEngine(engine.Engine):
    """`options`: further engine arguments of vLLM; with `tensor_parallel_size` n, n ranks form the engine. `sleeps`:
    vLLM allows that for only one engine of a process. The other arguments are those of `EngineOptions`."""

    joins = True

    def __init__(
        self,
        config: PreTrainedConfig,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        max_model_len: int | None = None,
        max_batch_sequences: int = 256,
        options: dict[str, Any] | None = None,
        gpu_share: float | None = GPU_SHARE,
        keep_caches: bool = False,
        sleeps: bool = True,
        reserve: int = 0,
    ):
        self.config, self.never = config, never_sampled(config)
        options = (options or {}) | ({"enable_prefix_caching": False} if keep_caches else {})
        self.sleeps, self.reserve = sleeps and torch.device(device).type == "cuda", reserve
        self.keep_caches, self.ranks = keep_caches, options.get("tensor_parallel_size", 1)
        self.max_model_len = options.get("max_model_len") or max_model_len or self.config.max_position_embeddings
        self.dtype, self.device, self.weight_version = dtype, torch.device(device), -1
        self.asleep: set[str] = set()  # of PARTS
        self.versions: set[str] = set()  # weight versions that unfinished responses may have been generated with
        self.acceptance, self.counting = Acceptance(), "speculative_config" in options
        self.validator = engine.WeightValidator(hf_shapes(config), config.model_type)
        cpu_patches.prepare()
        from megatron_rft.inference.vllm import draft_models, images, weights

        if self.never:
            images.replace_processor(config)
        weights.register()
        draft_models.load_from_their_folder()
        cpu_patches.repair()
        with tempfile.TemporaryDirectory(prefix="megatron-rft-") as folder:
            self.llm = cpu_patches.start(self._arguments(folder, max_batch_sequences, options, gpu_share))
        if self.never:
            images.mask(self._model(), self.never)
        record_shared_memory(shared_memory(os.getpid()))
        self.llm.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {}})

    def _arguments(self, folder: str, sequences: int, options: dict[str, Any], gpu_share: float | None) -> dict:
        """Return vLLM's engine arguments. The recipe's `options` take precedence over those of this package."""
        arguments.save_config(self.config, Path(folder))
        defaults = arguments.common(folder, self.dtype, "handover", self.max_model_len, sequences)
        defaults |= {"max_model_len": self.max_model_len, "max_num_seqs": sequences, "seed": 0}
        defaults |= {"disable_log_stats": True} | (arguments.SEEING if self.never else {})
        if self.ranks > 1 or (self.device.type == "cuda" and dist.is_initialized()):
            defaults["distributed_executor_backend"] = "external_launcher"  # use this rank's device, not the first one
        if self.device.type == "cuda":
            defaults |= {"enable_sleep_mode": self.sleeps}
            if self.sleeps and self.counting and options["speculative_config"].get("model"):
                defaults["sleep_preserve_parameter_names"] = ["draft.*"]  # no trainer sends a draft model's weights
            defaults |= self._share(options, gpu_share) if gpu_share else {}
        else:
            room = arguments.cache_bytes(self.config, self.dtype, self.max_model_len, sequences, self.ranks)
            defaults |= {"enforce_eager": True, "kv_cache_memory_bytes": room}
        if self.counting:  # the statistics count the accepted tokens
            defaults["disable_log_stats"] = False
            options = options | {"speculative_config": arguments.speculation(options["speculative_config"])}
        return defaults | options

    def _share(self, options: dict[str, Any], share: float) -> dict[str, Any]:
        """Return the sizes of an engine beside the trainer. Raises ConfigError if its share is not free now."""
        torch.cuda.empty_cache()  # what the trainer has offloaded, torch's allocator still keeps
        free, total = torch.cuda.mem_get_info(self.device)
        share = options.get("gpu_memory_utilization", share)
        if share * total > free - self.reserve:
            raise ConfigError(
                f"vllm.gpu_memory_utilization: {share:g} of {total / GIB:.1f} GiB is more than is free beside the "
                f"trainer, {free / GIB:.1f} GiB, less rollout.reserve_gib {self.reserve / GIB:g}. Lower it, or set "
                "rollout.offload_trainer=true"
            )
        if self.counting and options["speculative_config"].get("model"):
            return {"gpu_memory_utilization": share}  # vLLM measures what a draft model takes
        whole = hf_shapes(self.config).items()
        weights = sum(math.prod(shape) / (1 if TOWER in name else self.ranks) for name, shape in whole)
        sequence = arguments.token_bytes(self.config, self.dtype, self.ranks) * self.max_model_len
        cache = room_for_cache(share, total, weights * self.dtype.itemsize, sequence)
        return {"gpu_memory_utilization": share, "kv_cache_memory_bytes": cache}

    # --- generation

    def generate(self, requests: list[engine.Request], sampling: engine.Sampling) -> Iterator[engine.Group]:
        if self.weight_version < 0 or self.asleep:
            raise RunFailed("generation was asked for before any weights were loaded")
        assert self._is_first_rank() or not requests, "a rank that is not its engine's first has requests"
        asked = [replace(request, problem=request.problem and request.problem.shown) for request in requests]
        requests, self.sampling = self.agree((asked, sampling))
        self.answers: dict[int, list[Response | None]] = {}
        if not self.sampling.continues:  # cached prefixes of an earlier call would change the log-probs' last bits
            self.llm.reset_prefix_cache()
        self.versions = {str(self.weight_version)}
        try:
            self.add(requests)
            while self.llm.has_unfinished_requests():
                here.move()
                if self.on_step:
                    self.on_step()
                for output in self._step():
                    id, sample = map(int, output.request_id.split("/"))
                    self.answers[id][sample] = self._response(output.outputs[0])
                    if None not in self.answers[id]:
                        group = engine.Group(id, tuple(self.answers.pop(id)))
                        if self._is_first_rank():
                            yield group
        finally:  # abort the requests of an abandoned iterator
            unfinished = self.answers.items()
            left = [f"{id}/{i}" for id, some in unfinished for i, each in enumerate(some) if each is None]
            if left and self.llm is not None:
                self.llm.abort_request(left)

    def add(self, requests: list[engine.Request]) -> None:
        from megatron_rft.inference.vllm import images

        room = f"the engine was built for {self.max_model_len} (vllm.max_model_len)"
        engine.check_requests(requests, self.sampling, self.max_model_len, room, self.config.vocab_size)
        self.answers |= {request.id: [None] * request.n for request in requests}
        for request in requests:
            prompt: Any = {"prompt_token_ids": list(request.prompt_ids)}
            if request.problem and request.problem.images_key >= 0:
                prompt = images.prompt(request.prompt_ids, request.problem.images, self.config, self.dtype)
            for sample in range(request.n):
                self._add(request, sample, prompt)

    def agree(self, value: Any) -> Any:
        if self.ranks == 1:
            return value
        group, held = self._group(), [value]
        dist.broadcast_object_list(held, group.ranks[0], group.cpu_group)
        return held[0]

    def _is_first_rank(self) -> bool:
        return self.ranks == 1 or self._group().is_first_rank

    def _group(self) -> Any:
        from vllm.distributed import get_tp_group

        return get_tp_group()

    def _step(self) -> list[Any]:
        """Run one step. The lock protects global state of vLLM's forward pass; `fork_rng` protects the trainer's random
        generator, from which vLLM draws. CUDA's current device is that of a thread, and 0 in the refiner's."""
        with STEPPING, torch.random.fork_rng(devices=[]), torch.accelerator.device_index(self.device.index):
            return self.llm.step()

    def _add(self, request: engine.Request, sample: int, prompt: Any) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        parameters = SamplingParams(
            **arguments.sampling_parameters(request, sample, self.sampling),
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self.llm.add_request(f"{request.id}/{sample}", prompt, parameters)

    def _response(self, output: Any) -> Response:
        tokens, flat = tuple(output.token_ids), output.logprobs
        logprobs = tuple(flat.logprobs[start] for start in flat.start_indices)  # the sampled token comes first
        assert len(tokens) == len(logprobs), f"{len(tokens)} tokens, {len(logprobs)} log-probs"
        supports = ()
        if self.sampling.truncates:
            spans = zip(flat.start_indices, flat.end_indices, strict=True)
            pairs = (zip(flat.token_ids[a:b], flat.logprobs[a:b], strict=True) for a, b in spans)
            supports = tuple(arguments.kept_tokens(each) for each in pairs)
        versions = [span.version for span in output.weight_versions or ()]
        if not versions or not set(versions) <= self.versions:
            raise RunFailed(
                f"vLLM wrote a response with weights of version {', '.join(versions) or 'unknown'}, and those "
                f"of version {self.weight_version} were loaded"
            )
        return Response(tokens, logprobs, output.finish_reason, int(versions[0]), supports)

    def statistics(self) -> dict[str, float]:
        counted = self.llm.get_metrics() if self.counting else ()
        return self.acceptance.since((metric.name, metric.value) for metric in counted if metric.name in COUNTERS)

    # --- weights

    @torch.no_grad()
    def load_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load the stream. After a problem it is still read to its end, because it runs collectives; then the first
        problem is raised, and `generate` refuses to run."""
        from megatron_rft.inference.vllm import weights

        self.weight_version = -1
        checked = ((name, tensor.detach()) for name, tensor in self.validator.checked(stream))
        problem = weights.send(self.llm, checked)
        if problem := self.validator.end() or problem:
            raise RunFailed(f"weights of version {version}: {problem}")
        self.llm.set_weight_version(str(version))
        if self.never:
            self.llm.reset_encoder_cache()  # what the former tower made of images
        if not self.keep_caches:  # vLLM then recomputes the caches of unfinished responses
            self.llm.reset_prefix_cache(reset_running_requests=True)
        self.weight_version = version
        self.versions.add(str(version))

    def checksums(self) -> dict[str, int]:
        from megatron_rft.inference.vllm import readback

        return readback.checksums(self._model(), self.dtype)

    def _model(self) -> torch.nn.Module:
        return self.llm.model_executor.driver_worker.model_runner.model

    # --- memory

    def sleep(self) -> None:
        if self.sleeps and not self.asleep:
            with asleep.changes():
                self.llm.sleep(level=2)
            self.asleep, self.weight_version = set(PARTS), -1

    def wake(self, cache: bool = True) -> None:
        if parts := [part for part in PARTS if part in self.asleep and (cache or part == "weights")]:
            with asleep.changes():
                self.llm.wake_up(parts)
            for embeds in getattr(self._model(), "deepstack_input_embeds", None) or ():
                embeds.zero_()  # of Qwen3-VL; vLLM restores registered buffers alone
            self.asleep -= set(parts)

    def close(self) -> None:
        if getattr(self, "llm", None) is None:
            return
        cpu_patches.shut_down(self.llm)
        self.llm = None
        self.weight_version = -1
