"""The engines that a run has beside its ranks: how many, on which device, driven by whom; and their weights."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rft.config import Recipe
from megatron_rft.config.recipe import CORRECT, ROUNDED
from megatron_rft.conversion import hf_shapes
from megatron_rft.inference import weight_sync
from megatron_rft.inference.engine import Engine
from megatron_rft.inference.pool import Fleet, shares
from megatron_rft.inference.process import EngineProcess
from megatron_rft.inference.vllm.arguments import speculation
from megatron_rft.inference.vllm.server_client import ServerEngine
from megatron_rft.inference.vllm.server_process import OwnServer
from megatron_rft.megatron.actor import Actor
from megatron_rft.plan.engines import engine_processes, gpu_share
from megatron_rft.utils.errors import ConfigError


def build(
    recipe: Recipe,
    hf_config: Any,
    build_engine: Callable[[torch.device], Engine] | None,
    dtype: torch.dtype,
    gather: Callable[[list], list],
) -> Fleet:
    """This rank's engines outside of it. `build_engine` runs in processes of the run's own, if any."""
    spare, rank, world = spare_gpus(), dist.get_rank(), dist.get_world_size()
    count = how_many(recipe, spare)
    mine, place, places = shares(count, rank, world)
    neighbours = engines_of_node(count, rank, world)
    members = []
    try:
        for index in mine:
            if recipe.rollout.servers:
                members.append(_given_server(recipe, hf_config, dtype, index))
                continue
            environment = _environment(recipe, neighbours.index(index), spare)
            if recipe.rollout.placement == "process":
                members.append(_process(recipe, build_engine, index, environment))
            else:
                members.append(_own_server(recipe, hf_config, dtype, index, environment))
    except BaseException:
        for member in members:
            member.close()
        raise
    fleet = Fleet(members, dtype, gather, (place, places))
    if torch.cuda.is_available():
        fleet.news += [f"{member.name} gets its weights by {member.transport}" for member in members]
    return fleet


def _process(recipe: Recipe, build_engine: Callable, index: int, environment: dict[str, str]) -> EngineProcess:
    return EngineProcess(
        partial(build_engine, torch.device("cuda:0" if torch.cuda.is_available() else "cpu")),
        f"engine process {index}",
        _folder(recipe) / f"engine_{index}.log",
        recipe.faults.engine_start_s,
        recipe.faults.engine_silence_s,
        environment,
    )


def _given_server(recipe: Recipe, hf_config: Any, dtype: torch.dtype, index: int) -> ServerEngine:
    options = _of_servers(recipe, hf_config, dtype) | {"longest": longest(recipe, hf_config)}
    server = ServerEngine(recipe.rollout.servers[index], **options)
    if server.rounds and not recipe.corrects:
        raise ConfigError(f"rollout.servers: {server.url}: {ROUNDED} {CORRECT}")
    return server


def _own_server(recipe: Recipe, hf_config: Any, dtype: torch.dtype, index: int, environment: dict) -> OwnServer:
    shared = torch.cuda.is_available() and not alone(recipe)
    share = {"gpu_memory_utilization": gpu_share(recipe)} if shared else {}
    return OwnServer(
        log=_folder(recipe) / f"server_{index}.log",
        environment=environment,
        arguments=share | server_arguments(recipe, hf_config),
        **_of_servers(recipe, hf_config, dtype),
    )


def _of_servers(recipe: Recipe, hf_config: Any, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "config": hf_config,
        "shapes": {name: torch.Size(shape) for name, shape in hf_shapes(hf_config).items()},
        "dtype": dtype,
        "start_timeout_s": recipe.faults.engine_start_s,
        "silence_timeout_s": recipe.faults.engine_silence_s,
        "keep_caches": recipe.rollout.cache_after_sync == "keep",
    }


def longest(recipe: Recipe, hf_config: Any) -> int:
    """Tokens of prompt and response that an engine is asked for."""
    return min(recipe.longest_generation, hf_config.max_position_embeddings)


def server_arguments(recipe: Recipe, hf_config: Any) -> dict[str, Any]:
    """vLLM's, of a server that the run starts: ours, under the recipe's."""
    own = {"max_model_len": longest(recipe, hf_config), "max_num_seqs": recipe.rollout.max_batch_sequences}
    own |= {"enable_prefix_caching": False} if recipe.rollout.cache_after_sync == "keep" else {}
    arguments = own | recipe.vllm.arguments()
    if "speculative_config" in arguments:
        arguments["speculative_config"] = speculation(arguments["speculative_config"])
    return arguments


def _folder(recipe: Recipe) -> Path:
    return Path(recipe.run.output_dir) / "engines"


def _environment(recipe: Recipe, number: int, spare: list[str]) -> dict[str, str]:
    """Of engine `number` of this node: it is nobody's rank, and sees its own GPUs."""
    environment = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    if torch.cuda.is_available():
        seen = devices(number, recipe.vllm.tensor_parallel_size, spare, own_device())
        if spare and recipe.rollout.placement == "process":  # its rank's, too: weights come through the memory of that
            seen = [*seen, own_device()]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(seen)
    return environment


def how_many(recipe: Recipe, spare: list[str]) -> int:
    """Engines of the whole run, where each node has `spare` GPUs without a rank."""
    return engine_processes(recipe, dist.get_world_size(), len(spare) * nodes())


def alone(recipe: Recipe) -> bool:
    """Whether the engines of this node have GPUs to themselves, without a rank and without another engine."""
    spare = spare_gpus()
    here = engines_of_node(how_many(recipe, spare), dist.get_rank(), dist.get_world_size())
    return len(here) <= len(spare) // recipe.vllm.tensor_parallel_size


def engines_of_node(count: int, rank: int, world: int) -> list[int]:
    """Those of all `count` that the ranks of this node drive."""
    first, ranks = rank - int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return [engine for other in range(first, first + ranks) for engine in shares(count, other, world)[0]]


def check_gpus(recipe: Recipe) -> None:
    """Before anything is loaded: a server that the run will start finds its GPUs on this node."""
    rollout = recipe.rollout
    if rollout.placement == "server" and not rollout.servers and torch.cuda.is_available():
        devices(0, recipe.vllm.tensor_parallel_size, spare_gpus(), own_device())


def devices(number: int, workers: int, spare: list[str], own: str) -> list[str]:
    """The GPUs of engine `number` of this node: of those that no rank uses; where there are none, its rank's `own`."""
    if not spare and workers == 1:
        return [own]
    places = len(spare) // workers
    if not places:
        raise ConfigError(
            f"vllm.tensor_parallel_size: a server takes {workers} GPUs, and {len(spare)} of this node's are without a "
            "rank. Start fewer ranks, or set rollout.placement=colocated: the ranks' own GPUs are then engines together"
        )
    first = number % places * workers
    return spare[first : first + workers]


def nodes() -> int:
    return max(1, dist.get_world_size() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def visible_gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]


def own_device() -> str:
    """This rank's, as CUDA_VISIBLE_DEVICES names it."""
    return visible_gpus()[int(os.environ.get("LOCAL_RANK", "0"))]


def spare_gpus() -> list[str]:
    """Of this node, those that no rank uses."""
    return visible_gpus()[int(os.environ.get("LOCAL_WORLD_SIZE", "1")) :] if torch.cuda.is_available() else []


def place(engine: Engine) -> tuple[int | None, int]:
    """This rank's place among those that have an engine to ask, None where it has none, and their number."""
    if isinstance(engine, Fleet):
        return engine.place
    number, follows = divmod(dist.get_rank(), engine.ranks)
    return None if follows else number, dist.get_world_size() // engine.ranks


class Sync:
    """The actor's weights in the engine, and again in one that replaces a lost one."""

    def __init__(self, actor: Actor, engine: Engine, version: int):
        """`version`: the number of steps that the actor has made. The trainer counts it on."""
        self.actor, self.engine, self.version = actor, engine, version
        if isinstance(engine, Fleet):
            engine.reload = partial(self._push, verify=True)

    def rest(self) -> None:
        """Until the next push nobody asks an engine inside of this rank: its device memory is the trainer's."""
        self.engine.sleep()

    def push(self, verify: bool = False) -> dict[str, float]:
        """Collective. What the actor has now; metrics of the sync."""
        self.engine.wake()
        metrics = self._push(verify)
        if isinstance(self.engine, Fleet):
            self.engine.recover()
        return metrics

    def _push(self, verify: bool) -> dict[str, float]:
        return weight_sync.push(self.actor.stream(), self.engine, self.version, verify)


def losses(engine: Engine, note: Callable[[str], None]) -> dict[str, float]:
    """Metrics of engines that were replaced, and a note for a person of each."""
    if not isinstance(engine, Fleet):
        return {}
    for line in engine.news:
        note(line)
    engine.news.clear()
    return {"faults/engine_restarts": float(engine.restarts)}
