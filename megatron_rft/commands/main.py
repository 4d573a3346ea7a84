"""What the commands of `megatron-rft` do (arguments.py says what they take). Recipes are validated before torch is
imported.

Exit statuses: 0 finished, 2 a mistake of the user's, 3 the run failed, 75 stopped by a signal after a checkpoint (the
same command goes on), 130 Ctrl-C before there was anything to save.
"""

import argparse
import contextlib
import json
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

from megatron_rft.commands import doctor
from megatron_rft.commands.parser import parse
from megatron_rft.config import Recipe, load
from megatron_rft.launching import ranks as launcher
from megatron_rft.launching import slurm
from megatron_rft.launching.job import Job
from megatron_rft.launching.ranks import FAILED, FINISHED, STOPPED, USER_ERROR
from megatron_rft.plan import check, check_store_is_there, check_writable, make_folder
from megatron_rft.utils.errors import RunFailed, UserError, disk_is_full

# What megatron-core makes torch and itself warn of, on every rank, and no user can change. `doctor` speaks of apex.
NOISE = (
    ".*Apex (is|are) not installed",
    "full scope is deprecated",
    "The .grad attribute of a Tensor that is not a leaf",
    "`torch.distributed.* is deprecated",
)
PICTURES = (".png", ".pdf", ".svg")


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status; mistakes of the user's are one line on stderr, without a traceback."""
    args = parse(arguments)
    for message in NOISE:
        warnings.filterwarnings("ignore", message=message)
    if not sys.stderr.isatty():  # a log wants no bars of other packages, which read this when they are imported
        os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        return COMMANDS[args.command](args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        if job := getattr(args, "job", None):  # the other nodes hear of it, or say the same
            place = slurm.place()
            Job(job, Path(), place.node, place.nodes).conclude(USER_ERROR)
        return USER_ERROR
    except RunFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    except ModuleNotFoundError as error:
        if not (package := doctor.package_of(error.name)):
            raise
        print(f"error: {package} is not installed: pip install {package}; all that is missing: doctor", file=sys.stderr)
        return USER_ERROR
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        if not disk_is_full(error):
            raise
        print(f"error: {disk_full(error)}", file=sys.stderr)
        return FAILED


def disk_full(error: OSError) -> str:
    where = f" where {error.filename} is" if error.filename else ""
    return f"the disk is full{where}. Free some space and run the same command again: it goes on from what is complete"


def _overrides(args: argparse.Namespace) -> list[str]:
    return args.overrides + ([f"rollout.engine={args.engine}"] if args.engine else [])


def _train(args: argparse.Namespace) -> int:
    world_size, place = launcher.check_environment(args.nproc)
    recipe = load(args.recipe, _overrides(args))
    if recipe.trainer == "generate" and args.command == "train":
        raise UserError(f"{args.recipe} is a recipe of trainer generate: run it with `megatron-rft generate`")
    ranks = world_size, launcher.ranks_per_node(world_size, place)
    plan = check(recipe, *ranks, gpu_gib=getattr(args, "gpu_gib", None))
    is_rank = "RANK" in os.environ
    if not args.dry_run and not is_rank:
        check_store_is_there(recipe)  # before a model of gigabytes comes
        if _fetch_models(recipe):
            plan = check(recipe, *ranks)  # there is more to check now
    if os.environ["RANK"] == "0" and launcher.PARENT not in os.environ if is_rank else place.node == 0:
        print(plan, flush=True)
    _check_own_code(recipe)
    check_writable(recipe.run.output_dir)
    if args.dry_run:
        return FINISHED
    make_folder(recipe.run.output_dir)
    if (world_size > 1 or args.job) and not is_rank:
        command = [sys.executable, "-m", "megatron_rft", args.command, args.recipe, *_overrides(args)]
        output_dir = recipe.run.output_dir
        job = args.job and Job(args.job, Path(output_dir), place.node, place.nodes)
        return launcher.launch(command, args.nproc or 1, output_dir, place, job)
    if recipe.trainer == "generate":
        launcher.see_one_gpu()
    return _work(recipe, _run)


def _fetch_models(recipe: Recipe) -> bool:
    """Models of the hub, before any rank starts. Whether there was something to fetch."""
    from megatron_rft.data.hub import is_here, model_folder

    critic, model = recipe.critic and recipe.critic.path, recipe.model
    named = {"model.path": model.path, "model.tokenizer": model.tokenizer, "model.reference": model.reference}
    missing = {option: path for option, path in (named | {"critic.path": critic}).items() if path and not is_here(path)}
    for option, path in missing.items():
        print(f"{option}: {path} comes from the Hugging Face hub", flush=True)
        model_folder(path, option)
    return bool(missing)


def _check_own_code(recipe: Recipe) -> None:
    """A recipe that names code of the user's: whether it can be used, before any rank starts."""
    if recipe.algorithm.of_user:
        from megatron_rft.training import online

        online.build_objective(recipe)
    for reward in recipe.reward.everything():
        if reward.kind == "own":
            from megatron_rft.rewards.user_reward import OwnReward

            OwnReward(reward.function, reward.maximum)


def _generate(args: argparse.Namespace) -> int:
    recipe = load(args.recipe, _overrides(args))
    if recipe.trainer != "generate":
        raise UserError(f"{args.recipe} is a recipe of trainer {recipe.trainer}: run it with `megatron-rft train`")
    return _train(args)


def _serve(args: argparse.Namespace) -> int:
    recipe = load(args.recipe, [*_overrides(args), "rollout.placement=server", "rollout.servers=[]"])
    check_writable(args.out, "--out")
    from megatron_rft.commands import serve

    return serve.run(recipe, args.out)


def _run(recipe: Recipe) -> int:
    if recipe.trainer == "generate":
        from megatron_rft.commands import generate

        return generate.run(recipe)
    from megatron_rft import training  # imports torch

    return training.train(recipe)


def _work(recipe: Recipe, run: Callable[[Recipe], int]) -> int:
    """This process's part of the run, and its last words for whoever launched it."""
    launcher.die_with_launcher()
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):  # until the trainer has something to save
        signal.signal(number, _stop_at_once)
    try:
        status, message = run(recipe), ""
    except UserError as error:
        status, message = USER_ERROR, str(error)
    except RunFailed as error:
        status, message = FAILED, str(error)
    except Exception as error:
        status, message = FAILED, f"{type(error).__name__}: {error}"
        if isinstance(error, OSError) and disk_is_full(error):
            message = disk_full(error)
        else:
            traceback.print_exc()
    launcher.write_exit(recipe.run.output_dir, status, message)
    if message and launcher.PARENT not in os.environ:  # a launcher says it once for all ranks
        print(f"error: {message}", file=sys.stderr)
    return status


def _stop_at_once(number: int, _frame: object) -> None:
    """Nothing is to be saved. No unwinding, which would begin wherever the signal came (parts of torch's import swallow
    it), and not the interpreter's end, which waits for libraries' threads. What this process has started ends with it,
    as when it is killed."""
    interrupted = number == signal.SIGINT
    with contextlib.suppress(RuntimeError, OSError):  # the signal came in the middle of a print
        sys.stdout.flush()
        if interrupted:
            print("interrupted", file=sys.stderr, flush=True)
    os._exit(128 + number if interrupted else STOPPED)


def _evaluate(args: argparse.Namespace) -> int:
    run_folder = Path(load(args.recipe, _overrides(args)).run.output_dir)
    model = args.model or str(run_folder / "export")
    from megatron_rft.commands import convert, evaluate

    source = convert.find_source(model, args.like, "--model")
    # A Megatron checkpoint has no *.safetensors, which `check` looks for: of its folder only the rest is used.
    initialise = "pretrained" if source.format == "hf" and source.path == source.companions else "random"
    place = [f"model.path={json.dumps(str(source.companions))}", f"model.initialise={initialise}"]
    recipe = load(args.recipe, [*_overrides(args), *place])
    check(recipe)
    out = args.out or run_folder / "evaluation" / (Path(model).name if source.format == "hf" else source.path.name)
    check_writable(out, "--out")
    return evaluate.run(recipe, source, out)


def _convert(args: argparse.Namespace) -> int:
    from megatron_rft.commands import convert

    file_bytes = round(args.file_gib * 2**30)
    return convert.run(args.source, args.out, args.to, args.like, args.tensor_parallel, file_bytes, args.logits)


def _harness(args: argparse.Namespace) -> int:
    check_writable(args.out, "--out")
    from megatron_rft.commands import lm_eval

    return lm_eval.run(args.model, args.like, args.tasks.split(","), args.include, args.limit, args.out)


def _report(args: argparse.Namespace) -> int:
    from megatron_rft import report

    out = args.out or (args.runs[0] / "report" if len(args.runs) == 1 else Path("report"))
    page, picture, *charts = report.write(args.runs, out)
    print(f"{page}\n{picture} ({len(charts)} charts, each alone in {out / 'charts'})")
    return FINISHED


def _dynamics(args: argparse.Namespace) -> int:
    from megatron_rft.report import dynamics

    return _draw(dynamics.draw, args)


def _constraints(args: argparse.Namespace) -> int:
    from megatron_rft.report import constraints

    return _draw(constraints.draw, args)


def _draw(draw: Callable[[list[Path], Path], Path], args: argparse.Namespace) -> int:
    for run in args.runs:
        if not all((run / name).is_file() for name in ("metrics.jsonl", "recipe.yaml")):
            raise UserError(f"{run} is not the folder of a run: it has no metrics.jsonl and recipe.yaml")
    if args.out.suffix not in PICTURES:
        raise UserError(f"--out: {args.out} is no {', '.join(PICTURES)}")
    try:
        print(draw(args.runs, args.out))
    except OSError as error:
        raise UserError(f"--out: {args.out} cannot be written: {error.strerror}") from None
    return FINISHED


def _heatmap(args: argparse.Namespace) -> int:
    from megatron_rft.report import refinements

    data = args.run / "refinements.jsonl"
    if not data.is_file():
        raise UserError(
            f"{args.run} has no refinements.jsonl: constraint.examples_every of a dynamic constraint writes it"
        )
    try:
        print(refinements.write(args.run, data))
    except OSError as error:
        raise UserError(f"{args.run} cannot be written: {error.strerror}") from None
    return FINISHED


def _doctor(_args: argparse.Namespace) -> int:
    print(doctor.report())
    return USER_ERROR if doctor.missing() else FINISHED


COMMANDS = {
    "train": _train,
    "generate": _generate,
    "serve": _serve,
    "plan": _train,
    "evaluate": _evaluate,
    "convert": _convert,
    "harness": _harness,
    "report": _report,
    "dynamics": _dynamics,
    "constraints": _constraints,
    "heatmap": _heatmap,
    "doctor": _doctor,
}
