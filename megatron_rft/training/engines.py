"""Builds the generation engines of a run, and assigns them to the GPUs and the ranks of a node."""

import os
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig

from megatron_rft.config import Recipe
from megatron_rft.config.trainers import CORRECT, ROUNDED
from megatron_rft.inference.engine import Engine, EngineBuild, EngineOptions
from megatron_rft.inference.pool import EnginePool, shares
from megatron_rft.inference.process import EngineProcess
from megatron_rft.inference.vllm.arguments import speculation
from megatron_rft.inference.vllm.server_client import ServerEngine
from megatron_rft.inference.vllm.server_process import LocalServer
from megatron_rft.inference.weight_sync import EngineWeights
from megatron_rft.megatron import parallel
from megatron_rft.megatron.actor import Actor
from megatron_rft.plan.devices import GIB
from megatron_rft.plan.engines import engine_processes, gpu_share
from megatron_rft.plan.model_shape import ModelShape
from megatron_rft.plan.vllm import GPU_SHARE, choose, choose_for
from megatron_rft.utils.errors import ConfigError
from megatron_rft.utils.late_imports import lean_import

# A refined response mostly copies the response, which is in the refiner's prompt: vLLM proposes what follows there.
COPIES = {"method": "ngram", "num_speculative_tokens": 16, "prompt_lookup_max": 4}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16}


@dataclass(frozen=True)
class EngineBuilder:
    """Builds a recipe's engines, without weights."""

    recipe: Recipe

    @property
    def folder(self) -> Path:
        """Of logs of engines in processes and servers."""
        return Path(self.recipe.run.output_dir) / "engines"

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.recipe.rollout.dtype or self.recipe.model.precision]

    # ---- the policy's engine and the refiner's

    def build(self, hf_config: Any) -> Engine:
        """The policy's engine of this rank: in this process, in other processes, or on servers."""
        choose_for(self.recipe.rollout, ModelShape(hf_config.to_dict()))  # again: now the model is here
        if self.recipe.rollout.placement != "colocated":
            return self._pool(hf_config)
        engine = self.local(hf_config, gpu_share=gpu_share(self.recipe))(parallel.device())
        parallel.barrier("start")
        return engine

    def build_beside(self, models: list[Actor]) -> tuple[Engine, EngineWeights]:
        """The policy's engine, and its weights from the first of the trained `models`. The engine measures the free
        memory at its start: before, moments are created, and with rollout.offload_trainer all training state leaves."""
        for model in models:
            model.optimizer.fill_in()
        offloaded = models if self.recipe.rollout.offload_trainer else []
        for model in offloaded:
            model.training_state.offload()
        engine = self.build(models[0].hf_config)
        weights = EngineWeights(models[0], engine, offloaded)
        if offloaded:
            weights.sleep()
        return engine, weights

    def build_refining(self, hf_config: Any) -> Engine:
        """The refiner's engine, in this process. It accepts longer prompts than the policy's."""
        own = {"max_model_len": self.longest_refinement(hf_config), "tensor_parallel_size": 1}
        arguments = self.recipe.vllm.arguments() | own
        if self.recipe.constraint.temperature == 0:  # above it, speculation changes the tokens of a seed
            arguments = {"speculative_config": COPIES} | arguments
        engine = self.local(hf_config, arguments, gpu_share(self.recipe))(parallel.device())
        parallel.barrier("start")
        return engine

    def local(
        self, hf_config: Any, arguments: dict[str, Any] | None = None, gpu_share: float | None = GPU_SHARE
    ) -> EngineBuild:
        """A function that builds the engine of `rollout.engine` on a device. It can be pickled for another process.

        `arguments`: vLLM's, for the refiner. `gpu_share`: of the device's memory; None if no other process uses the
        device.
        """
        options = EngineOptions(
            max_batch_sequences=self.recipe.rollout.max_batch_sequences,
            max_model_len=self.longest(hf_config),
            options=self.recipe.vllm.arguments() if arguments is None else arguments,
            gpu_share=gpu_share,
            keep_caches=arguments is None and self.recipe.rollout.cache_after_sync == "keep",
            reserve=round(self.recipe.rollout.reserve_gib * GIB),
            sleeps=arguments is None,  # vLLM's sleep mode supports one engine per process: the policy's
        )
        engine = lean_import(f"megatron_rft.inference.{self.kind(hf_config)}.engine")
        return engine.builder(hf_config, self.dtype, options)

    def kind(self, config: PreTrainedConfig) -> str:
        """Resolves `rollout.engine` for a local engine: a name of ENGINES."""
        return choose(self.recipe.rollout.engine, ModelShape(config.to_dict())).name

    def longest(self, hf_config: Any) -> int:
        """The longest sequence of prompt and response, in tokens, that an engine must support."""
        return min(self.recipe.longest_generation, hf_config.max_position_embeddings)

    def longest_refinement(self, hf_config: Any) -> int:
        """The same for the refiner. Allowing all of the model's positions would need a larger cache."""
        return min(self.recipe.longest_refinement, hf_config.max_position_embeddings)

    # ---- engines outside of the ranks

    def server_arguments(self, hf_config: Any) -> dict[str, Any]:
        """vLLM's arguments for a server that the run starts: defaults, overridden by the recipe's."""
        own = {"max_model_len": self.longest(hf_config), "max_num_seqs": self.recipe.rollout.max_batch_sequences}
        own |= {"enable_prefix_caching": False} if self.recipe.rollout.cache_after_sync == "keep" else {}
        arguments = own | self.recipe.vllm.arguments()
        if "speculative_config" in arguments:
            arguments["speculative_config"] = speculation(arguments["speculative_config"])
        return arguments

    def check_gpus(self) -> None:
        """Check, before anything is loaded, that this node has the GPUs for a server that the run will start."""
        if self.recipe.rollout.placement == "server" and not self.recipe.rollout.servers and torch.cuda.is_available():
            devices(0, self.recipe.vllm.tensor_parallel_size, spare_gpus(), own_device())

    def alone(self) -> bool:
        """Whether each engine of this node has its own GPUs, shared with no rank and no other engine."""
        spare = spare_gpus()
        here = engines_of_node(self._count(spare), dist.get_rank(), dist.get_world_size())
        return len(here) <= len(spare) // self.recipe.vllm.tensor_parallel_size

    def _count(self, spare: list[str]) -> int:
        """The number of engines of the whole run, if each node has `spare` GPUs without a rank."""
        nodes = max(1, dist.get_world_size() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        return engine_processes(self.recipe.rollout, self.recipe.vllm, dist.get_world_size(), len(spare) * nodes)

    def _pool(self, hf_config: Any) -> EnginePool:
        """The engines outside this process that this rank drives."""
        spare, rank, world = spare_gpus(), dist.get_rank(), dist.get_world_size()
        count = self._count(spare)
        mine, driver, drivers = shares(count, rank, world)
        neighbours = engines_of_node(count, rank, world)
        start = self._process if self.recipe.rollout.placement == "process" else self._local_server
        members = []
        with ExitStack() as started:  # closes those that run if another one fails
            for index in mine:
                if self.recipe.rollout.servers:
                    members.append(self._given_server(hf_config, index))
                else:
                    members.append(start(hf_config, index, self._environment(neighbours.index(index), spare)))
                started.callback(members[-1].close)
            started.pop_all()
        pool = EnginePool(members, self.dtype, parallel.gather, (driver, drivers))
        if torch.cuda.is_available():
            pool.news += [f"{member.name} gets its weights by {member.transport}" for member in members]
        return pool

    def _process(self, hf_config: Any, index: int, environment: dict[str, str]) -> EngineProcess:
        build_on = self.local(hf_config, gpu_share=None if self.alone() else gpu_share(self.recipe))
        return EngineProcess(
            partial(build_on, torch.device("cuda:0" if torch.cuda.is_available() else "cpu")),
            f"engine process {index}",
            self.folder / f"engine_{index}.log",
            self.recipe.faults.engine_start_s,
            self.recipe.faults.engine_silence_s,
            environment,
        )

    def _given_server(self, hf_config: Any, index: int) -> ServerEngine:
        options = self._server_options(hf_config) | {"longest": self.longest(hf_config)}
        server = ServerEngine(self.recipe.rollout.servers[index], **options)
        if server.rounds and not self.recipe.corrects:
            raise ConfigError(f"rollout.servers: {server.url}: {ROUNDED} {CORRECT}")
        return server

    def _local_server(self, hf_config: Any, index: int, environment: dict[str, str]) -> LocalServer:
        shared = torch.cuda.is_available() and not self.alone()
        share = {"gpu_memory_utilization": gpu_share(self.recipe)} if shared else {}
        options = self._server_options(hf_config) | {"arguments": share | self.server_arguments(hf_config)}
        return LocalServer(log=self.folder / f"server_{index}.log", environment=environment, **options)

    def _server_options(self, hf_config: Any) -> dict[str, Any]:
        return {
            "config": hf_config,
            "dtype": self.dtype,
            "start_timeout_s": self.recipe.faults.engine_start_s,
            "silence_timeout_s": self.recipe.faults.engine_silence_s,
            "keep_caches": self.recipe.rollout.cache_after_sync == "keep",
        }

    def _environment(self, number: int, spare: list[str]) -> dict[str, str]:
        """Environment of engine `number` of this node: a world of one rank that sees only the engine's GPUs."""
        environment = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        if torch.cuda.is_available():
            seen = devices(number, self.recipe.vllm.tensor_parallel_size, spare, own_device())
            if spare and self.recipe.rollout.placement == "process":
                seen = [*seen, own_device()]  # weights come through the memory of the rank's GPU
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(seen)
        return environment


# ---- a node's GPUs and ranks


def engines_of_node(count: int, rank: int, world: int) -> list[int]:
    """The indices, among `count` engines, of those that the ranks of this node drive."""
    first, ranks = rank - int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return [engine for other in range(first, first + ranks) for engine in shares(count, other, world)[0]]


def devices(number: int, workers: int, spare: list[str], own: str) -> list[str]:
    """The GPUs of engine `number` of this node: `spare` ones, or its rank's GPU `own` if there are none."""
    if not spare and workers == 1:
        return [own]
    slots = len(spare) // workers
    if not slots:
        raise ConfigError(
            f"vllm.tensor_parallel_size: a server takes {workers} GPUs, and {len(spare)} of this node's are without a "
            "rank. Start fewer ranks, or set rollout.placement=colocated: engines then share the ranks' GPUs"
        )
    first = number % slots * workers
    return spare[first : first + workers]


def visible_gpus() -> list[str]:
    """The visible GPUs, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]


def own_device() -> str:
    """This rank's GPU, as CUDA_VISIBLE_DEVICES names it."""
    return visible_gpus()[int(os.environ.get("LOCAL_RANK", "0"))]


def spare_gpus() -> list[str]:
    """The GPUs of this node that no rank uses."""
    return visible_gpus()[int(os.environ.get("LOCAL_WORLD_SIZE", "1")) :] if torch.cuda.is_available() else []
