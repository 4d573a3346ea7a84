"""The engines that a run has beside its ranks: how many, on which device, driven by whom; and their weights."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_rft import weight_sync
from megatron_rft.config import Recipe
from megatron_rft.config.plan import engine_processes
from megatron_rft.megatron.actor import Actor
from megatron_rft.rollout.engine import Engine
from megatron_rft.rollout.fleet import Fleet, shares
from megatron_rft.rollout.process_engine import EngineProcess


def build(
    recipe: Recipe,
    build_engine: Callable[[torch.device], Engine],
    dtype: torch.dtype,
    gather: Callable[[list], list],
) -> Fleet:
    """This rank's engine processes. `build_engine` runs in them."""
    spare = spare_gpus()
    count = engine_processes(recipe, dist.get_world_size(), len(spare) * nodes())
    mine, place, places = shares(count, dist.get_rank(), dist.get_world_size())
    members = []
    try:
        for index in mine:
            members.append(_process(recipe, build_engine, index, spare))
    except BaseException:
        for member in members:
            member.close()
        raise
    return Fleet(members, dtype, gather, (place, places))


def _process(recipe: Recipe, build_engine: Callable, index: int, spare: list[str]) -> EngineProcess:
    device, environment = "cpu", {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    if torch.cuda.is_available():
        device = "cuda:0"
        own = visible_gpus()[int(os.environ.get("LOCAL_RANK", "0"))]
        environment["CUDA_VISIBLE_DEVICES"] = spare[index % len(spare)] if spare else own
    return EngineProcess(
        partial(build_engine, torch.device(device)),
        f"engine process {index}",
        Path(recipe.run.output_dir) / "engines" / f"engine_{index}.log",
        recipe.faults.engine_start_s,
        recipe.faults.engine_silence_s,
        environment,
    )


def nodes() -> int:
    return max(1, dist.get_world_size() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def visible_gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]


def spare_gpus() -> list[str]:
    """Of this node, those that no rank uses."""
    return visible_gpus()[int(os.environ.get("LOCAL_WORLD_SIZE", "1")) :] if torch.cuda.is_available() else []


def place(engine: Engine) -> tuple[int | None, int]:
    """This rank's place among those that have an engine to ask, None where it has none, and their number."""
    return engine.place if isinstance(engine, Fleet) else (dist.get_rank(), dist.get_world_size())


class Sync:
    """The actor's weights in the engine, and again in one that replaces a lost one."""

    def __init__(self, actor: Actor, engine: Engine, version: int):
        """`version`: the number of steps that the actor has made. The trainer counts it on."""
        self.actor, self.engine, self.version = actor, engine, version
        if isinstance(engine, Fleet):
            engine.reload = partial(self._push, verify=True)

    def push(self, verify: bool = False) -> dict[str, float]:
        """Collective. What the actor has now; metrics of the sync."""
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
