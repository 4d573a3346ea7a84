"""Runs recipes with NeMo-Run: on this machine, or on Slurm from a login node or through ssh; alone or as a sweep.

    python launch/nemo.py RECIPE [section.option=value ...] --local --nproc 2
    python launch/nemo.py RECIPE --account ME --partition GPU --gpus-per-node 8 --workspace /lustre/me/rft
    python launch/nemo.py RECIPE ... --sweep pipo.learning_rate=1e-7,1e-6 --sweep run.seed=1,2,3      # 6 jobs
    python launch/nemo.py RECIPE ... --dry-run                                                        # prints scripts

Exit status: 0 every job has succeeded (with --detach: is in the queue), 2 a mistake in what was given, 1 otherwise.
NeMo-Run wants older packages than a run does, so it has an environment of its own (tools/setup_nemo_env.sh), and this
file imports nothing of the package's: --setup leads to the environment of the run. docs/cluster.md has the rest.
"""

import argparse
import itertools
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent))
from login_node import LoginNode, UserError, last  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
SENT = [ROOT / "megatron_rft", ROOT / "examples"]
LEAD = 600  # seconds ahead of the time limit at which a job is told to save and end


@dataclass(frozen=True)
class Point:
    """One job: a command of megatron-rft on a recipe, and its overrides of the recipe."""

    name: str
    keys: list[str]
    recipe: str
    command: str = "train"


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description="Runs a recipe, or a sweep over one, by NeMo-Run.", allow_abbrev=False)
    top.add_argument("recipe", help="a YAML file")
    top.add_argument("keys", nargs="*", default=[], metavar="section.option=value", help="on top of the recipe")
    top.add_argument(
        "--sweep", action="append", default=[], metavar="section.option=A,B", help="one job for each value"
    )
    top.add_argument("--generate", action="store_true", help="a recipe of trajectories: `megatron-rft generate`")
    top.add_argument("--local", action="store_true", help="on this machine, one job after the other")
    top.add_argument("--nproc", type=int, metavar="N", help="ranks per node (default: GPUs per node)")
    top.add_argument("--setup", default=":", metavar="CODE", help="shell code that makes `python` the right one")
    top.add_argument("--name", help="of the experiment (default: the recipe's)")
    top.add_argument("--dry-run", action="store_true", help="print what would be run")
    slurm = top.add_argument_group("Slurm")
    slurm.add_argument("--account")
    slurm.add_argument("--partition")
    slurm.add_argument("--time", default="24:00:00", help="limit of one start; the job goes on in the next")
    slurm.add_argument("--nodes", type=int, default=1, metavar="N")
    slurm.add_argument("--gpus-per-node", type=int, metavar="N")
    slurm.add_argument("--gpu-gib", default="80", metavar="GIB", help="memory of a GPU, for the check (default: 80)")
    slurm.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="any other of sbatch's")
    slurm.add_argument("--workspace", type=Path, help="folder that all nodes see: runs, notes, NeMo-Run's own files")
    slurm.add_argument("--image", help="container image, for pyxis")
    slurm.add_argument("--mounts", default="", metavar="FROM:TO,...", help="besides the workspace")
    slurm.add_argument("--host", metavar="USER@HOST[:PORT]", help="login node to reach by ssh (default: this is one)")
    slurm.add_argument("--identity", type=Path, metavar="FILE", help="ssh key")
    slurm.add_argument("--detach", action="store_true", help="do not wait for the end")
    return top


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    args, rest = parser().parse_known_args(arguments)  # keys may stand between options
    if wrong := [text for text in rest if text.startswith("-")]:
        parser().error(f"there is no option {' '.join(wrong)}")
    args.keys += rest
    if not Path(args.recipe).is_file():
        raise UserError(f"there is no recipe {args.recipe}")
    args.nproc = args.nproc or args.gpus_per_node or (1 if args.local else None)
    if not args.local:
        for option in ("account", "partition", "workspace"):
            if not getattr(args, option):
                raise UserError(f"no {option}: --{option}, or --local for this machine")
        if not args.nproc:
            raise UserError("no GPUs: --gpus-per-node 8, or --nproc 8 for 8 ranks per node without")
        if not args.workspace.is_absolute():
            raise UserError(f"--workspace {args.workspace}: give the whole path, which is the same on every node")
        if not Path(args.recipe).resolve().is_relative_to(ROOT / "examples"):
            raise UserError(
                f"{args.recipe} is not in {ROOT}, whose code and recipes are sent to the cluster: move it there"
            )
    args.login_node = LoginNode.of(args.host, args.identity)
    return args


def points(args: argparse.Namespace) -> list[Point]:
    """Return all combinations of the swept values, each with its own output folder."""
    axes = []
    for text in args.sweep:
        option, equals, values = text.partition("=")
        if not equals or not values:
            raise UserError(f"--sweep {text}: write section.option=A,B,C")
        axes.append([(option, value) for value in values.split(",")])
    name, folder = Path(args.recipe).stem, output_dir(args)
    same = {"recipe": args.recipe, "command": "generate" if args.generate else "train"}
    if not axes:
        return [Point(name, args.keys, **same)]
    found = []
    for chosen in itertools.product(*axes):
        # A job's name is that of files of NeMo-Run and Slurm: no slashes, spaces or braces of a value.
        label = "-".join(re.sub(r"[^\w.+-]+", "_", f"{option.rpartition('.')[2]}_{value}") for option, value in chosen)
        keys = [f"{option}={value}" for option, value in chosen]
        found.append(Point(f"{name}-{label}", [*args.keys, *keys, f"run.output_dir={folder}/{label}"], **same))
    if twice := [point.name for point in found if [each.name for each in found].count(point.name) > 1]:
        raise UserError(f"--sweep: two jobs would be called {twice[0]} and share its folder: sweep over other values")
    return found


def output_dir(args: argparse.Namespace) -> str:
    """Return the given output folder, else that of the recipe, with a subfolder for each point of a sweep."""
    given = [key.partition("=")[2] for key in args.keys if key.startswith("run.output_dir=")]
    own = yaml.safe_load(Path(args.recipe).read_text()).get("run") or {}
    return (given or [own.get("output_dir") or f"runs/{Path(args.recipe).stem}"])[-1]


def check(args: argparse.Namespace, jobs: list[Point]) -> None:
    """Print the plan of each job for its number of ranks, if there is an environment of the run (for Slurm: on the
    login node). An evaluation needs what its training exports and has no plan."""
    jobs = [job for job in jobs if job.command != "evaluate"]
    if not args.local:
        plans = {job.name: plan_of(args, job, recipe_there(job)) for job in jobs}
        args.login_node.check(args.workspace, SENT, None if args.image else args.setup, plans)
        return
    found = run_here(args, "python -c 'import megatron_rft.commands.main'")
    if found.returncode:
        print(f"not checked, for lack of an environment here: {last(found.stderr.strip())}", file=sys.stderr)
        return
    for job in jobs:
        done = run_here(args, f"python -m megatron_rft {shlex.join(plan_of(args, job, job.recipe))}")
        if done.returncode:
            raise UserError(f"{job.name}: " + done.stderr.strip().removeprefix("error: "))


def plan_of(args: argparse.Namespace, point: Point, recipe: str) -> list[str]:
    """Return the arguments of megatron-rft that plan a job, with the memory of its GPUs if it has any."""
    memory = ["--gpu-gib", args.gpu_gib] if args.gpus_per_node else []
    ranks = ["--nproc", str(args.nodes * args.nproc), "--gpus-per-node", str(args.nproc)]
    return ["plan", recipe, "--for", point.command, *ranks, *memory, *point.keys]


def lost_with_the_container(args: argparse.Namespace, folder: Path) -> bool:
    """Return whether a run writes to the container's file system, which is deleted with the job."""
    mounted = [args.workspace, *(Path(f"{mount}:{mount}".split(":")[1]) for mount in args.mounts.split(",") if mount)]
    return bool(args.image) and folder.is_absolute() and not any(map(folder.is_relative_to, mounted))


def run_here(args: argparse.Namespace, command: str) -> subprocess.CompletedProcess:
    """Run a command in the environment of the run."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    shell = ["bash", "-c", f"{args.setup}\n{command}"]
    return subprocess.run(shell, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)


def local_script(args: argparse.Namespace, point: Point) -> str:
    keys = shlex.join(words(args, point, point.recipe))
    path = f'export PYTHONPATH={shlex.quote(str(ROOT))}"${{PYTHONPATH:+:$PYTHONPATH}}"'
    return f"cd {shlex.quote(os.getcwd())}\n{args.setup}\n{path}\nexec python -m megatron_rft {keys}\n"


def words(args: argparse.Namespace, point: Point, recipe: str) -> list[str]:
    """An evaluation is one process."""
    ranks = [] if point.command == "evaluate" else ["--nproc", str(args.nproc)]
    return [point.command, recipe, *ranks, *point.keys]


def slurm_script(args: argparse.Namespace, point: Point) -> str:
    """Return the script that each node runs. A container mounts the job's folder as /nemo_run."""
    keys = shlex.join(words(args, point, recipe_there(point)))
    job = "" if point.command == "evaluate" else f" --job {notes(args)}"
    runs = shlex.quote(str(args.workspace / "runs"))
    return f"""
cd /nemo_run/code || exit 1
mkdir -p {runs} && {{ [ -e runs ] || ln -s {runs} runs 2>/dev/null || [ -e runs ]; }} || exit 1
{args.setup}
export PYTHONPATH="$PWD${{PYTHONPATH:+:$PYTHONPATH}}"
exec python -m megatron_rft {keys}{job}
"""


def recipe_there(point: Point) -> str:
    return str(Path(point.recipe).resolve().relative_to(ROOT))


def notes(args: argparse.Namespace) -> str:
    return f'{shlex.quote(str(args.workspace / "slurm"))}/"$SLURM_JOB_ID"'


def batch_lines(args: argparse.Namespace) -> str:
    """Return the lines before srun in NeMo-Run's batch script: its own srun would run in the foreground, and requeue
    user errors too."""
    return "\n".join(
        [
            "set +vx",
            "unset SLURM_UNBUFFEREDIO",  # it makes srun's output a terminal, and progress a live display in a log
            f"job={notes(args)}",
            '[ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] || rm -rf "$job"',
            'mkdir -p "$job"',
            (ROOT / "launch" / "requeue.sh").read_text(),
            'srun() { srun_with_stop "$@"; }',
            "trap 'requeue_if_due \"${exitcode:-0}\"' EXIT",
        ]
    )


def executor(args: argparse.Namespace):
    import nemo_run as run

    if args.local:
        return run.LocalExecutor(packager=run.Packager())
    tunnel, node = run.LocalTunnel(job_dir=""), args.login_node
    if node.host:
        key, folder = node.identity and str(node.identity), str(args.workspace / "nemo")
        tunnel = run.SSHTunnel(host=node.host, user=node.user, port=node.port, identity=key, job_dir=folder)
    workspace = f"{args.workspace}:{args.workspace}"
    others = dict(option.partition("=")[::2] for option in args.option)
    sent = [str(folder) for folder in SENT]
    return run.SlurmExecutor(
        account=args.account,
        partition=args.partition,
        time=args.time,
        nodes=args.nodes,
        ntasks_per_node=1,  # megatron-rft starts the ranks of its node
        gpus_per_node=args.gpus_per_node,
        signal=f"B:USR1@{LEAD}",
        additional_parameters={"requeue": True, **others},
        retries=0,  # batch_lines decides
        setup_lines=batch_lines(args),
        container_image=args.image,
        container_mounts=[workspace, *filter(None, args.mounts.split(","))] if args.image else [],
        srun_args=["--wait=0", "--cpu-bind=none"],
        tunnel=tunnel,
        packager=run.PatternPackager(include_pattern=sent, relative_path=[str(ROOT)] * len(sent)),
    )


def launch(args: argparse.Namespace, jobs: list[Point]) -> int:
    check(args, jobs)
    if lost_with_the_container(args, folder := Path(output_dir(args))):
        lost = "unless this cluster mounts it into every container, the run is lost with the container"
        print(f"warning: {folder} is in neither --workspace nor --mounts: {lost}", file=sys.stderr)
    if args.local or args.host:
        os.environ.setdefault("NEMORUN_HOME", str(ROOT / "runs" / "nemo"))
    else:
        os.environ["NEMORUN_HOME"] = str(args.workspace / "nemo")
    if not sys.stdout.isatty():
        os.environ.setdefault("COLUMNS", "200")  # what it prints are paths and scripts
    import nemo_run as run

    write = local_script if args.local else slurm_script
    name, quiet = args.name or Path(args.recipe).stem, {"enable_goodbye_message": False, "skip_status_at_exit": True}
    with run.Experiment(name, executor=executor(args), **quiet) as experiment:
        for point in jobs:
            script = write(args, point)
            experiment.add(run.Script(inline=script), name=point.name)
            if args.dry_run:
                print(f"# {point.name}, on each node:\n{script}")
        if args.dry_run:
            experiment.dryrun()
            return 0
        experiment.run(detach=args.detach, sequential=args.local)
    # The jobs are waited for at the end of the block, whose own status is 0 whatever became of them.
    told = experiment.status(return_dict=True)
    found = {job: str(each["status"].name) for job, each in told.items()}
    folders = {job: each.get("remote_dir", each["local_dir"]) for job, each in told.items()}
    return conclude(found, len(jobs), args.detach, folders)


def conclude(found: dict[str, str], wanted: int, detached: bool, folders: dict[str, str]) -> int:
    for job, status in found.items():
        print(f"{job}: {status}; its log is in {folders[job]}")
    good = {"SUCCEEDED"} | ({"SUBMITTED", "PENDING", "RUNNING"} if detached else set())
    bad = {job: status for job, status in found.items() if status not in good}
    if "UNKNOWN" in bad.values():
        print("error: sacct, which NeMo-Run asks, knows nothing of a job: it may be running still", file=sys.stderr)
    elif bad:
        print(f"error: {len(bad)} of {wanted} jobs did not succeed: {', '.join(bad)}", file=sys.stderr)
    return 0 if not bad and len(found) == wanted else 1


def main(arguments: list[str] | None = None, jobs: list[Point] | None = None) -> int:
    """`jobs`: in place of the recipe's or its sweep's."""
    try:
        args = parse(arguments)
        return launch(args, jobs or points(args))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name != "nemo_run":
            raise
        print(
            "error: NeMo-Run is not installed: pip install -r launch/nemo.lock, in an environment of its own",
            file=sys.stderr,
        )
        return 2


if __name__ == "__main__":
    sys.exit(main())
