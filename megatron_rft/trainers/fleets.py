"""The engines that a run has beside its ranks: how many, on which device, driven by whom; and their weights."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rft import weight_sync
from megatron_rft.config import Recipe
from megatron_rft.config.engines import engine_processes
from megatron_rft.config.recipe import CORRECT, ROUNDED
from megatron_rft.conversion import hf_shapes
from megatron_rft.errors import ConfigError
from megatron_rft.megatron.actor import Actor
from megatron_rft.rollout.engine import Engine
from megatron_rft.rollout.fleet import Fleet, shares
from megatron_rft.rollout.own_server import OwnServer
from megatron_rft.rollout.process_engine import EngineProcess
from megatron_rft.rollout.server_engine import ServerEngine
from megatron_rft.rollout.vllm_arguments import speculation


def build(
    recipe: Recipe,
    hf_config: Any,
    build_engine: Callable[[torch.device], Engine] | None,
    dtype: torch.dtype,
    gather: Callable[[list], list],
) -> Fleet:
    """This rank's engines outside of it. `build_engine` runs in processes of the run's own, if any."""
    spare = spare_gpus()
    count = engine_processes(recipe, dist.get_world_size(), len(spare) * nodes())
    mine, place, places = shares(count, dist.get_rank(), dist.get_world_size())
    members = []
    try:
        for index in mine:
            if recipe.rollout.placement == "process":
                members.append(_process(recipe, build_engine, index, spare))
            else:
                members.append(_server(recipe, hf_config, dtype, index, spare))
    except BaseException:
        for member in members:
            member.close()
        raise
    fleet = Fleet(members, dtype, gather, (place, places))
    if torch.cuda.is_available():
        fleet.news += [f"{member.name} gets its weights by {member.transport}" for member in members]
    return fleet


def _process(recipe: Recipe, build_engine: Callable, index: int, spare: list[str]) -> EngineProcess:
    environment = _environment(index, spare)
    if spare:  # this rank's GPU as well, after its own: weights come through the memory of that
        environment["CUDA_VISIBLE_DEVICES"] += f",{own_device()}"
    return EngineProcess(
        partial(build_engine, torch.device("cuda:0" if torch.cuda.is_available() else "cpu")),
        f"engine process {index}",
        _folder(recipe) / f"engine_{index}.log",
        recipe.faults.engine_start_s,
        recipe.faults.engine_silence_s,
        environment,
    )


def _server(recipe: Recipe, hf_config: Any, dtype: torch.dtype, index: int, spare: list[str]) -> ServerEngine:
    shapes = {name: torch.Size(shape) for name, shape in hf_shapes(hf_config).items()}
    limits = recipe.faults.engine_start_s, recipe.faults.engine_silence_s
    keeps = recipe.rollout.cache_after_sync == "keep"
    longest = min(recipe.longest_generation, hf_config.max_position_embeddings)
    if recipe.rollout.servers:
        server = ServerEngine(recipe.rollout.servers[index], hf_config, shapes, dtype, *limits, longest, keeps)
        if server.rounds and not recipe.corrects:
            raise ConfigError(f"rollout.servers: {server.url}: {ROUNDED} {CORRECT}")
        return server
    log = _folder(recipe) / f"server_{index}.log"
    arguments = server_arguments(recipe, longest)
    environment = _environment(index, spare, recipe.vllm.tensor_parallel_size)
    return OwnServer(hf_config, shapes, dtype, log, environment, arguments, *limits, keeps)


def server_arguments(recipe: Recipe, longest: int) -> dict[str, Any]:
    """vLLM's, of a server that the run starts: ours, under the recipe's."""
    own = {"max_model_len": longest, "max_num_seqs": recipe.rollout.max_batch_sequences}
    own |= {"enable_prefix_caching": False} if recipe.rollout.cache_after_sync == "keep" else {}
    arguments = own | recipe.vllm.arguments()
    if "speculative_config" in arguments:
        arguments["speculative_config"] = speculation(arguments["speculative_config"])
    return arguments


def _folder(recipe: Recipe) -> Path:
    return Path(recipe.run.output_dir) / "engines"


def _environment(index: int, spare: list[str], workers: int = 1) -> dict[str, str]:
    """Of an engine's process: it is nobody's rank, and sees its own GPUs."""
    environment = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    if torch.cuda.is_available():
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices(index, workers, spare, own_device()))
    return environment


def check_gpus(recipe: Recipe) -> None:
    """Before anything is loaded: a server that the run will start finds its GPUs on this node."""
    rollout = recipe.rollout
    if rollout.placement == "server" and not rollout.servers and torch.cuda.is_available():
        devices(0, recipe.vllm.tensor_parallel_size, spare_gpus(), own_device())


def devices(index: int, workers: int, spare: list[str], own: str) -> list[str]:
    """The GPUs of engine `index`: of those that no rank uses; where there are none, its rank's `own`."""
    if not spare and workers == 1:
        return [own]
    places = len(spare) // workers
    if not places:
        raise ConfigError(
            f"vllm.tensor_parallel_size: a server takes {workers} GPUs, and {len(spare)} of this node's are without a "
            "rank. Start fewer ranks, or set rollout.placement=colocated: the ranks' own GPUs are then engines together"
        )
    first = index % places * workers
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
        if not isinstance(self.engine, Fleet):
            self.engine.sleep()

    def push(self, verify: bool = False) -> dict[str, float]:
        """Collective. What the actor has now; metrics of the sync."""
        if isinstance(self.engine, Fleet):
            metrics = self._push(verify)
            self.engine.recover()
            return metrics
        self.engine.wake()
        return self._push(verify)

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
