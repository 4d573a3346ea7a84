"""The engines of a run, their placement, and checks for engine options without effect. No torch."""

from megatron_rft.config.messages import many
from megatron_rft.config.recipe import Recipe
from megatron_rft.config.sections import Rollout
from megatron_rft.config.vllm import Vllm
from megatron_rft.plan.vllm import GPU_SHARE, GPU_SHARE_BESIDE_CRITIC
from megatron_rft.utils.errors import ConfigError


def engine_processes(rollout: Rollout, vllm: Vllm, world_size: int, spare_gpus: int = 0) -> int:
    """Return the number of engines of the whole run, with placement process or server."""
    workers = vllm.tensor_parallel_size
    shared = 1 if world_size % workers else world_size // workers
    return len(rollout.servers) or rollout.processes or spare_gpus // workers or shared


def gpu_share(recipe: Recipe) -> float:
    """Return the default share of a device's memory for a vLLM engine."""
    share = GPU_SHARE_BESIDE_CRITIC if recipe.critic else GPU_SHARE
    return share / (2 if recipe.refines else 1)


def check_engines(recipe: Recipe, world_size: int, ranks_per_node: int | None = None) -> list[str]:
    """Checks the engines of the run and describes them."""
    rollout = recipe.rollout
    count, what = len(rollout.servers) or rollout.processes, "servers" if rollout.servers else "processes"
    ranks, workers = many(world_size, "rank"), recipe.vllm.tensor_parallel_size
    check_workers(recipe, world_size, ranks_per_node or world_size)
    if rollout.placement == "colocated":
        return [f"generation: {many(world_size // workers, 'engine')}, each {workers} ranks"] if workers > 1 else []
    if count and count % world_size and world_size % count:
        raise ConfigError(
            f"rollout.{what}: {count} engines cannot be shared evenly by {ranks}: one of the two "
            "numbers must divide the other"
        )
    if rollout.servers:
        return [f"generation: {', '.join(rollout.servers)}, for {ranks}"]
    gpus, each = ("GPU", "rank") if workers == 1 else (f"{workers} GPUs", f"{workers} ranks")
    how_many = f"{count} of their own" if count else f"their own, one on each spare {gpus}, else one per {each}"
    tensor_parallel = f" of {workers} workers each" if workers > 1 else ""
    kind = "vLLM servers" if rollout.placement == "server" else "engines in processes"
    return [f"generation: {kind}, {how_many}{tensor_parallel}, for {ranks}"]


def check_workers(recipe: Recipe, world_size: int, ranks_per_node: int) -> None:
    """Checks the placement of an engine on several devices."""
    workers, rollout = recipe.vllm.tensor_parallel_size, recipe.rollout
    if workers == 1:
        return
    place, server = f"vllm.tensor_parallel_size: {workers}", "rollout.placement=server"
    if recipe.trainer == "generate":
        raise ConfigError(f"{place}: each worker of `generate` has an engine on one device of its own: leave it out")
    if rollout.placement == "process":
        raise ConfigError(f"{place}: an engine process has one device. Set {server}, or colocated")
    if rollout.placement == "colocated" and world_size % workers:
        raise ConfigError(
            f"{place}: {workers} ranks in a row are one engine, and {many(world_size, 'rank')} cannot be divided so. "
            f"Set {server} for engines on devices of their own"
        )
    if rollout.placement == "colocated" and ranks_per_node % workers:
        raise ConfigError(
            f"{place}: {workers} ranks in a row are one engine, and with {many(ranks_per_node, 'rank')} on a node some "
            "of them would lie on two nodes. Give each node a multiple, or make engines smaller"
        )
    if rollout.placement == "colocated" and recipe.refines:
        raise ConfigError(
            f"{place}: the refiner's engine answers each rank at a time of its own, and ranks that are one engine have "
            f"no such time. Set {server}: the policy's engine then has {workers} devices, the refiner's one"
        )


def check_speed(recipe: Recipe, refining: str | None) -> None:
    """Rejects engine options that have no effect in this run. `refining`: the refiner's engine, if there is one. It
    runs in the rank's process, wherever the policy's engine runs."""
    options, rollout = recipe.vllm, recipe.rollout
    if rollout.servers and refining != "vllm" and (named := sorted(options.model_fields_set)):
        raise ConfigError(f"vllm.{named[0]}: does nothing with rollout.servers, which have their own options")
    if rollout.servers and refining is None and rollout.differs("max_batch_sequences"):
        raise ConfigError("rollout.max_batch_sequences: does nothing with rollout.servers: set their --max-num-seqs")
