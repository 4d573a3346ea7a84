"""`megatron-rft train`, `generate` and `plan`: check a recipe, and run it in this process or start its ranks.

Torch is imported after all checks.
"""

import argparse
import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from megatron_rft.config import Recipe, RewardOptions
from megatron_rft.config.algorithms.base import Algorithm
from megatron_rft.config.algorithms.online import Setting
from megatron_rft.config.environment import Base, Python
from megatron_rft.config.rewards import CodeOptions, OwnOptions
from megatron_rft.environments.worker import maker
from megatron_rft.launching import ranks as launcher
from megatron_rft.launching.job import Job
from megatron_rft.launching.run_folder import claim_folder
from megatron_rft.plan import check, check_store_is_there, check_writable, make_folder
from megatron_rft.plan.search import Search
from megatron_rft.tracking.loggers import check_key
from megatron_rft.utils import run_lock
from megatron_rft.utils.errors import FAILED, FINISHED, STOPPED, ConfigError, UserError, exit_status
from megatron_rft.utils.late_imports import lean_import
from megatron_rft.utils.processes import STOP_SIGNALS

HIDDEN = {"owner": 0o077, "group": 0o027, "all": 0}  # run.access -> bits of new files that others do not get


def run(args: argparse.Namespace) -> int:
    """Check the recipe, print its plan and, unless `args.dry_run`, run it. Returns the exit status."""
    recipe: Recipe = args.loaded
    check_command(recipe.trainer, getattr(args, "job_of", None) or args.command)
    starts, ranks = args.command != "plan", args.nproc or 1
    elsewhere = ranks, min(ranks, getattr(args, "gpus_per_node", None) or ranks), launcher.NODE  # those of a plan
    world_size, per_node, node = launcher.check_environment(args.nproc) if starts else elsewhere
    searching = getattr(args, "search", False)  # if so, the recipe's own layout need not fit
    if getattr(args, "device", None) and not searching:
        raise ConfigError("--device: only --search estimates the time on a device: add it, or leave --device out")
    plan = check(recipe, world_size, per_node, getattr(args, "gpu_gib", None), not searching, starts)
    is_rank = starts and "RANK" in os.environ
    started_elsewhere = is_rank and launcher.PARENT not in os.environ
    leads = os.environ["RANK"] == "0" if started_elsewhere else not is_rank and node.index == 0
    if started_elsewhere and recipe.faults.hang_s is not None:
        raise ConfigError("faults.hang_s: RANK is set, so no launcher of ours watches the ranks: leave it out")
    if not is_rank or started_elsewhere:
        check_user_code(recipe.algorithm, recipe.setting, recipe.environment, recipe.reward, not args.dry_run)
    if leads and not args.dry_run and recipe.tracking.wandb and recipe.tracking.wandb.mode == "online":
        check_key()
    if not args.dry_run and not is_rank:
        check_store_is_there(recipe)  # before a model is downloaded
        if fetch_models(recipe.models, recipe.model.tokenizer):
            plan = check(recipe, world_size, per_node, starts=True)  # again, with the model's configuration
    if leads:
        print(plan, flush=True)
    if searching:
        print("\n".join(Search(recipe, plan.layout, args.gpu_gib, args.device or "h100").table()), flush=True)
    check_writable(recipe.run.output_dir)
    try:
        if leads:  # other nodes may come when the run has begun
            claim_folder(recipe, writes=False)
    except ConfigError as error:
        if starts:
            raise
        print(f"warning: {error}", file=sys.stderr)
    if args.dry_run:
        return FINISHED
    os.umask(os.umask(0o077) | HIDDEN[recipe.run.access])  # the user's own may hide more
    make_folder(recipe.run.output_dir)
    with lock(Path(recipe.run.output_dir), leads, is_rank):
        watched = args.nproc or args.job or recipe.faults.hang_s is not None  # by a launcher, also if there is one rank
        if (world_size > 1 or watched) and not is_rank:
            command = [sys.executable, "-m", "megatron_rft", args.command, args.recipe, *args.overrides]
            job = args.job and Job(args.job, Path(recipe.run.output_dir), node)
            return launcher.launch(command, args.nproc or 1, recipe.run.output_dir, node, job, recipe.faults)
        if recipe.trainer == "generate":
            launcher.use_one_gpu()
        return work(recipe.run.output_dir, lambda: lean_import("megatron_rft.training").train(recipe))  # imports torch


def check_command(trainer: str, command: str) -> None:
    wanted = "generate" if trainer == "generate" else "train"
    if command not in (wanted, "plan"):
        raise UserError(f"this is a recipe of trainer {trainer}: run it with `megatron-rft {wanted}`")


def lock(folder: Path, leads: bool, is_rank: bool) -> contextlib.AbstractContextManager:
    """The lock of the run's folder, which the process of the run that `leads` holds."""
    if leads:
        return run_lock.held(folder)
    if not is_rank:
        run_lock.refuse_others(folder, same_job=True)
    return contextlib.nullcontext()


def fetch_models(models: dict[str, str], tokenizer: str | None) -> bool:
    """Download models (by option) from the hub before any rank starts. Returns whether any was missing."""
    from megatron_rft.data.hub import is_here, model_folder

    named = models | {"model.tokenizer": tokenizer}
    missing = {option: path for option, path in named.items() if path and not is_here(path)}
    for option, path in missing.items():
        print(f"{option}: downloading {path} from the Hugging Face hub", flush=True)
        model_folder(path, option)
    return bool(missing)


def check_user_code(
    algorithm: Algorithm, setting: Setting, environment: Base | None, rewards: RewardOptions, runs: bool = True
) -> None:
    """Load the user's algorithm, environment and rewards, if a recipe names any: errors show before any rank starts.
    `runs`: the recipe runs on this machine, which then needs a container if it has programs of the model."""
    if algorithm.of_user:
        from megatron_rft.training import user_algorithm

        user_algorithm.build_objective(algorithm, setting)
    if environment:
        from megatron_rft.environments.tools import schemas

        schemas(environment)
        if not isinstance(environment, Python):  # whose sandbox is the environments' processes'
            maker(**environment.own_options())
    for section in filter(None, [environment, *rewards.everything()]):
        if isinstance(section, Python | CodeOptions) and runs:
            from megatron_rft.rewards.code import container

            container(section.without_container)
        if isinstance(section, OwnOptions):
            from megatron_rft.rewards import registry

            with contextlib.closing(registry.build(section)) as own:
                own.check()


def work(output_dir: str, run: Callable[[], int]) -> int:
    """Run this process's part, and write its exit status and message for the launcher."""
    launcher.die_with_launcher()
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # more are processes that stop signals end
    launcher.show_position(output_dir)
    for number in STOP_SIGNALS:  # the trainer replaces these handlers
        signal.signal(number, stop_at_once)
    try:
        status, message = run(), ""
    except Exception as error:
        if (outcome := exit_status(error)) is None:
            traceback.print_exc()
        status, message = outcome or (FAILED, f"{type(error).__name__}: {error}")
    written = launcher.write_exit(output_dir, status, message)
    if message and not (written and launcher.PARENT in os.environ):  # a launcher prints it once for all ranks
        print(f"error: {message}", file=sys.stderr)
    return status


def stop_at_once(number: int, _frame: object) -> None:
    """End the process at once; there is nothing to save yet.

    An exception would not work: the signal may arrive inside an import of torch that catches everything. Nor would a
    normal exit, which waits for the threads of libraries. Child processes end with this one.
    """
    interrupted = number == signal.SIGINT
    with contextlib.suppress(RuntimeError, OSError):  # the signal arrived in the middle of a print
        sys.stdout.flush()
        if interrupted:
            print("interrupted", file=sys.stderr, flush=True)
    run_lock.release()
    os._exit(128 + number if interrupted else STOPPED)
