"""Reads this process's node in a Slurm job step, and the address of rank 0, from Slurm's environment variables.

Only the environment is used, because a container has no scontrol. A batch script or an `salloc` shell is not a step: a
process there is a run on one node.
"""

import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from megatron_rft.utils.errors import ConfigError

HOOK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


@dataclass(frozen=True)
class Node:
    """This node among the run's nodes, and rank 0's address and port; port None: any free one."""

    index: int = 0
    count: int = 1
    address: str = "127.0.0.1"
    port: int | None = None


def in_step(environment: Mapping[str, str] = os.environ) -> bool:
    return "SLURM_STEP_ID" in environment and "SLURM_PROCID" in environment


def this_node(environment: Mapping[str, str] = os.environ) -> Node:
    """Return this node of the step. Address and port are those that the user has set, else from what Slurm says."""
    nodes = int(environment.get("SLURM_STEP_NUM_NODES", "1")) if in_step(environment) else 1
    if nodes == 1:
        return Node()
    address = environment.get("MASTER_ADDR") or first_host(environment["SLURM_STEP_NODELIST"])
    given = environment.get("MASTER_PORT") or port(environment)
    return Node(int(environment["SLURM_NODEID"]), nodes, address, int(given))


def clear_hook_variables(environment: MutableMapping[str, str] = os.environ) -> None:
    """Delete torch.distributed's variables that a hook of enroot has set as if each task were a rank
    (50-slurm-pytorch.sh, which many clusters enable for PyTorch images). For a task that starts ranks itself."""
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "1")
    rank = (environment.get("SLURM_PROCID"), environment.get("SLURM_LOCALID"), tasks)
    if in_step(environment) and tuple(map(environment.get, HOOK_VARIABLES)) == rank:
        for name in HOOK_VARIABLES:
            del environment[name]


def check_ranks_per_node(nproc: int, environment: Mapping[str, str] = os.environ) -> None:
    """Check that this process can start `nproc` ranks on its node.

    Raises:
        ConfigError: other tasks start ranks on the same node, or it has fewer GPUs than that.
    """
    if not in_step(environment):
        return
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE", "1")
    if not re.fullmatch(r"1(\(x\d+\))?", tasks):
        raise ConfigError(
            f"--nproc {nproc}: this step has {tasks} tasks per node, each of which would start {nproc} ranks: use "
            "srun --ntasks-per-node=1"
        )
    gpus = int(environment.get("SLURM_GPUS_ON_NODE", nproc))
    if gpus < nproc:
        raise ConfigError(
            f"--nproc {nproc}: node {environment.get('SLURMD_NODENAME')} has {gpus} GPUs in this job. Ask for equally "
            "many on every node: sbatch --gpus-per-node"
        )


def first_host(nodes: str) -> str:
    """Return the first host of Slurm's short form: n[08-11,13],m2 -> n08."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)[0]
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)


def port(environment: Mapping[str, str] = os.environ) -> int:
    """Return a port that depends on job, step and restart, below the range of ephemeral ports."""
    parts = (environment.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"))
    job, step, start = (int(part) for part in parts)
    return 20000 + (job * 31 + step * 7 + start) % 10000
